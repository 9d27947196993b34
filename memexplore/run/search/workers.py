"""Worker processes of this machine: each gets a program once, and then answers requests about it.

What a request asks for is up to the function that the workers are started with: a run of a setting (`runners`), a
search (`search_process`), a prediction beside a training loop.

On Linux one fresh process imports torch, unpacks the program and builds its model, and then forks several workers, so
that this is done once and its memory is shared. It runs nothing itself: after a backward pass torch refuses another in
a forked process. Elsewhere, and where this machine has a usable GPU, which a forked process could not use, every worker
is a fresh process.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import gc
import math
import multiprocessing
import multiprocessing.connection
import multiprocessing.context
import os
import pickle
import queue
import signal
import sys
import threading
import time
import types
import warnings
import weakref
from collections.abc import Callable, Generator
from multiprocessing.connection import Connection
from multiprocessing.context import SpawnProcess
from typing import Any, NoReturn

import cloudpickle
import torch

from memexplore.run.machine import CUDA, default_name
from memexplore.run.programs.packing import unpacked
from memexplore.run.programs.step import Step
from memexplore.run.programs.step_record import built_model
from memexplore.run.search.process_settings import ProcessSettings, set_process_settings
from memexplore.virtual_gpu.dispatch import autograd_engine

NICENESS = 5
"""Lower priority of workers than that of the process that started them, in whose notebook cells run."""
_SECONDS_TO_END = 2.0
"""Seconds that a process has to end after a request to do so, before it is asked again."""
_MORE_REQUESTS = 2
"""Further requests before it is killed."""
_READY = b"ready"
_PR_SET_PDEATHSIG = 1
"""Of `prctl` in Linux's sys/prctl.h."""

Answer = Callable[[Any, Any], Generator[Any, None, None]]
"""Answers a request about a program, which may be packed, with one value or several; all of them can be pickled.

It raises nothing: an error is an answer."""


def processor_count() -> int:
    """Return the number of processors that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def can_fork() -> bool:
    """Return whether workers are forked: on Linux, and not from a process that may have used a real GPU."""
    return sys.platform == "linux" and default_name() != CUDA


def build(step: Step) -> None:
    """Build the model of a step in a process that will be forked. Raises what the function of the step raises."""
    with autograd_engine.without_backward():
        built_model(step)


class Worker:
    """One worker, as the process that started it sees it. Every method raises EOFError or OSError where it has died."""

    def __init__(self, connection: Connection) -> None:
        self.connection = connection
        self.is_ready = False
        """Whether it has begun to take requests."""

    def wait_until_ready(self) -> None:
        """Wait until the worker has imported torch and got its program."""
        self.connection.recv_bytes()
        self.is_ready = True

    def send(self, request: Any) -> None:
        """Send a request."""
        self.connection.send_bytes(cloudpickle.dumps(request))

    def receive(self) -> Any:
        """Wait for the next answer. Raises what its unpickling raises."""
        return pickle.loads(self.connection.recv_bytes())


class Workers:
    """Workers with the same program and the same function; they end with this process, if not before."""

    def __init__(self, answer: Answer) -> None:
        self._answer = answer
        self.all: list[Worker] = []
        self._processes: list[tuple[SpawnProcess, Connection]] = []
        self._forks: list[int] = []
        _workers.add(self)

    @property
    def are_alive(self) -> bool:
        """Whether the processes that were started have not ended."""
        return all(process.is_alive() for process, _ in self._processes)

    def start(self, count: int = 1, niceness: int = NICENESS, before: Callable[[], object] | None = None) -> None:
        """Start workers in fresh processes, which first call `before` and then wait for their program."""
        for size in [count] if count > 1 and can_fork() else [1] * count:
            pipes = [multiprocessing.Pipe() for _ in range(size)]
            self.all += [Worker(mine) for mine, _ in pipes]
            ends = [its for _, its in pipes]
            process = _Process(target=_main, args=(ends, self._answer, niceness, before))
            process.start()
            self._processes.append((process, pipes[0][0]))
            for its in ends:
                # The end of the process then ends the connection.
                its.close()

    def give(self, program: bytes, settings: ProcessSettings) -> None:
        """Give the processes that were started their program and the settings of this process."""
        message = pickle.dumps((program, settings))

        def send() -> None:
            # TypeError: the connection was closed meanwhile.
            with contextlib.suppress(OSError, TypeError):
                for _, connection in self._processes:
                    connection.send_bytes(message)

        # In a thread: a process that has just been started reads it after some seconds only.
        threading.Thread(target=send, name="memexplore-program", daemon=True).start()

    def fork(self, program: Any, count: int) -> None:
        """Fork workers from this process, which has run no backward pass, with a program that is not packed."""
        for _ in range(count):
            mine, its = multiprocessing.Pipe()
            self.all.append(Worker(mine))
            process = _fork()
            if process == 0:
                for worker in self.all:
                    worker.connection.close()
                _serve_and_exit(its, self._answer, program)
            self._forks.append(process)
            its.close()

    def stop(self) -> None:
        """End the workers without waiting for what they do; who waits for an answer gets an EOFError.

        It may be called in any thread, and twice.
        """
        for process, _ in self._processes:
            process.terminate()
        forks, self._forks = self._forks, []
        for fork in forks:
            _kill(fork)

    def kill(self) -> None:
        """End those of the processes that were started whose program has ignored `stop`."""
        for process, _ in self._processes:
            process.kill()

    def close(self) -> None:
        """End the workers and their connections, in the thread that uses them."""
        self.stop()
        for worker in self.all:
            worker.connection.close()
        self.all, self._processes = [], []

    def join(self) -> None:
        """Wait for the end of the processes that were started."""
        for process, _ in self._processes:
            process.join()


_workers: weakref.WeakSet[Workers] = weakref.WeakSet()


@atexit.register
def _stop_all() -> None:
    # Python waits at its exit for processes that are no daemons; a daemon could not start workers for its search.
    for workers in list(_workers):
        workers.stop()


# --- processes ------------------------------------------------------------------------------------------------------


class _Process(SpawnProcess):
    """A spawned process that does not import the user's script again: cloudpickle sends the needed objects."""

    @staticmethod
    def _Popen(process_obj: Any) -> Any:  # type: ignore[override]  # noqa: N802
        return start_without_script(SpawnProcess, process_obj)


def start_without_script(kind: Any, process: Any) -> Any:
    """Start a process as a class of multiprocessing does, where `__main__` is empty."""
    before = sys.modules["__main__"]
    sys.modules["__main__"] = types.ModuleType("__main__")
    try:
        return kind._Popen(process)
    finally:
        sys.modules["__main__"] = before


def _fork() -> int:
    # The other threads wait for the end of the parent process and of this one, or send a program.
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        return os.fork()


def _end_with_parent() -> None:
    """Have this process killed when the thread that forked it ends, which may be killed before it can end this one."""
    if ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL):
        raise OSError(ctypes.get_errno(), "prctl")


def _kill(process: int) -> None:
    with contextlib.suppress(ProcessLookupError, ChildProcessError):
        os.kill(process, signal.SIGKILL)
        os.waitpid(process, 0)


def _kill_this_process() -> NoReturn:
    # A forked process has the exit functions of the process that forked it.
    while True:
        os.kill(os.getpid(), signal.SIGKILL)


# --- in the processes -----------------------------------------------------------------------------------------------


class _Ended(BaseException):
    """Ends this process. A BaseException, so that `except Exception` cannot catch it."""


def _main(connections: list[Connection], answer: Answer, niceness: int, before: Callable[[], object] | None) -> None:
    """Serve a connection in this process, or each of several in a fork of it."""
    # An interrupt of a notebook or a terminal reaches the whole process group; the parent ends its workers itself.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    _end_when_terminated()
    status = 1
    try:
        if hasattr(os, "nice"):
            os.nice(niceness)
        torch.set_num_threads(1)
        if before is not None:
            before()
        program, settings = pickle.loads(connections[0].recv_bytes())
        set_process_settings(settings)
        if len(connections) == 1:
            _serve(connections[0], answer, program)
        else:
            _fork_each(connections, answer, program)
        status = 0
    except (EOFError, _Ended):
        pass
    finally:
        # Python would print an exception that is raised in the functions that come next, and that a signal is ignored
        # which has just arrived.
        signal.signal(signal.SIGTERM, lambda *_: None)
    # Temporary files are removed. The rest of the interpreter's end is left out: the destructors of torch may wait for
    # ever for a thread that the interpreter has ended, and who started this process waits for its end.
    atexit._run_exitfuncs()
    os._exit(status)


def _end_when_terminated() -> None:
    """Raise `_Ended` at SIGTERM, or when the parent has ended, which removes files on its way; else kill this process.

    The exception is lost where it is raised in a callback, such as that of a weak reference, or where a cell catches
    it. It is then raised again.
    """
    # Its `put` may be called in a handler that interrupts another; `Event.set` would wait for a lock of this thread.
    terminated: queue.SimpleQueue[None] = queue.SimpleQueue()
    parent = multiprocessing.parent_process()
    raised_at = -math.inf

    def raise_ended(*_: object) -> None:
        # Who starts this process may ask twice, as when its own program ends: the second request must not interrupt
        # what the first has begun.
        nonlocal raised_at
        now = time.monotonic()
        if now - raised_at < _SECONDS_TO_END / 2:
            return
        raised_at = now
        terminated.put(None)
        raise _Ended

    def end_with_parent() -> None:
        if parent is not None:
            multiprocessing.connection.wait([parent.sentinel])
            os.kill(os.getpid(), signal.SIGTERM)

    def insist() -> None:
        terminated.get()
        for _ in range(_MORE_REQUESTS):
            time.sleep(_SECONDS_TO_END)
            os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(_SECONDS_TO_END)
        # Its own workers end when the connections to this process do.
        _kill_this_process()

    signal.signal(signal.SIGTERM, raise_ended)
    for wait in (end_with_parent, insist):
        threading.Thread(target=wait, daemon=True).start()


def _fork_each(connections: list[Connection], answer: Answer, packed: bytes) -> None:
    """Fork a worker for each connection, after what they share was done, and wait for the end of this process."""
    program: Any = packed
    # Every run raises the error.
    with contextlib.suppress(Exception):
        program = unpacked(packed)
        build(program)
    gc.freeze()
    forks: list[int] = []
    try:
        for number, connection in enumerate(connections):
            process = _fork()
            if process == 0:
                for other in connections[number + 1 :]:
                    other.close()
                _serve_and_exit(connection, answer, program)
            forks.append(process)
            connection.close()
        signal.pause()
    finally:
        for process in forks:
            _kill(process)
        _kill_this_process()


def _serve_and_exit(connection: Connection, answer: Answer, program: Any) -> NoReturn:
    """Serve a connection in a forked process, and end the process without the exit functions of its parent."""
    try:
        _end_with_parent()
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        # Raises where torch refuses a backward pass here; the other end then runs the settings itself.
        autograd_engine.sole_owner_counts()
        _serve(connection, answer, program)
    finally:
        _kill_this_process()


def _serve(connection: Connection, answer: Answer, program: Any) -> None:
    """Send that this process is ready, then the answers to every request, until the other end is closed."""
    with contextlib.suppress(EOFError, OSError):
        connection.send_bytes(_READY)
        while True:
            request = pickle.loads(connection.recv_bytes())
            with contextlib.closing(answer(program, request)) as values:
                for value in values:
                    connection.send_bytes(cloudpickle.dumps(value))
