"""Processes of this machine that run settings of one step, each with a connection of its own.

In: a step and the number of processes. Out: `Lanes`, whose connections take a request and send the bytes of a `Result`.

On Linux one fresh process imports torch, unpacks the step and builds its model, and then forks the others, so that all
of this is done once and its memory is shared. It runs nothing itself: after a backward pass torch refuses another in a
forked process. A search in a process of its own forks from that one. Elsewhere, and where this machine has a usable
GPU, which a forked process could not use, every process is a fresh one.
"""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import multiprocessing
import multiprocessing.connection
import os
import signal
import sys
import warnings
from collections import deque
from multiprocessing.connection import Connection
from multiprocessing.context import SpawnProcess
from typing import Any

import cloudpickle

from memexplore import targets
from memexplore.knobs.knobs import Knobs
from memexplore.search import workers
from memexplore.steps.step import Step
from memexplore.steps.step_record import built_model
from memexplore.virtual_gpu.dispatch import autograd_engine


def can_fork() -> bool:
    """Return whether processes are forked: on Linux, and not from one that may have used a real GPU."""
    return sys.platform == "linux" and targets.default_target() != targets.CUDA


_READY = b"ready"


@dataclasses.dataclass(eq=False)
class Lane:
    """One process: its connection, the setting that it runs, and the settings whose traces it has."""

    connection: Connection
    is_ready: bool = False
    running: Knobs | None = None
    traced: set[Knobs] = dataclasses.field(default_factory=set)
    """Settings that were run here; on another allocator they take no run."""
    code: set[Knobs] = dataclasses.field(default_factory=set)
    """The same without batch and input size: with other ones they take half a run."""

    def send(self, knobs: Knobs, request: bytes) -> None:
        """Let the process run a setting. Raises OSError where it has died."""
        self.running = knobs
        self.traced.add(knobs.replace(settings=None))
        self.code.add(code_of(knobs))
        self.connection.send_bytes(request)

    def receive(self) -> bytes | None:
        """Return the bytes of the result of the setting that runs; None for the first message, that it is ready.

        Raises EOFError or OSError where the process has died.
        """
        received = self.connection.recv_bytes()
        if not self.is_ready:
            self.is_ready = True
            return None
        self.running = None
        return received


def code_of(knobs: Knobs) -> Knobs:
    """Return a setting without what changes sizes and the allocator only.

    >>> code_of(Knobs(batch=4, precision="bf16", settings="expandable_segments:True"))
    Knobs(precision='bf16')
    """
    return knobs.replace(settings=None, batch=None, input_size=None)


def next_for(lane: Lane, waiting: deque[Knobs], lanes: list[Lane]) -> Knobs | None:
    """Remove and return the setting that a process runs next, None for none.

    First the settings that take less time there; then those that no other process has traces of.
    """
    others = [one for one in lanes if one is not lane]

    def rank(knobs: Knobs) -> int | None:
        if knobs.replace(settings=None) in lane.traced:
            return 0
        if any(knobs.replace(settings=None) in one.traced for one in others):
            return None
        if code_of(knobs) in lane.code:
            return 1
        return 3 if any(code_of(knobs) in one.code for one in others) else 2

    ranks = {knobs: found for knobs in waiting if (found := rank(knobs)) is not None}
    if not ranks:
        return None
    chosen = min(ranks, key=lambda knobs: ranks[knobs])
    waiting.remove(chosen)
    return chosen


class Lanes:
    """Processes that run settings of one step; `close` ends them."""

    def __init__(self, step: Step, count: int, settings: workers.ProcessSettings) -> None:
        """Start the processes and return at once. Raises UnsendableStepError for a step that cannot be sent."""
        self.lanes: list[Lane] = []
        self._processes: list[SpawnProcess] = []
        self._forked: list[int] = []
        try:
            if _forks_here:
                self._fork(step, count)
            else:
                self._spawn(step, count, settings)
        except BaseException:
            self.close()
            raise

    def _spawn(self, step: Step, count: int, settings: workers.ProcessSettings) -> None:
        packed = workers.pack_step(step)
        forks = can_fork()
        for size in [count] if forks else [1] * count:
            pipes = [multiprocessing.Pipe() for _ in range(size)]
            self.lanes += [Lane(mine) for mine, _ in pipes]
            arguments = ([its for _, its in pipes], packed, cloudpickle.dumps(settings), forks)
            process = workers.new_process(_serve_step, arguments)
            process.start()
            self._processes.append(process)
            for _, its in pipes:
                # The end of the process then ends the connection.
                its.close()

    def _fork(self, step: Step, count: int) -> None:
        build(step)
        for _ in range(count):
            mine, its = multiprocessing.Pipe()
            self.lanes.append(Lane(mine))
            process = _fork()
            if process == 0:
                for lane in self.lanes:
                    lane.connection.close()
                _serve_and_exit(its, step)
            self._forked.append(process)
            its.close()

    def close(self) -> None:
        """End the processes without waiting for what they run."""
        for process in self._processes:
            process.terminate()
        for pid in self._forked:
            _end(pid)
        for lane in self.lanes:
            lane.connection.close()
        self.lanes, self._processes, self._forked = [], [], []


# --- forks ----------------------------------------------------------------------------------------------------------

_forks_here = False


def fork_here() -> None:
    """Let `Lanes` fork from this process, which has run no step yet and runs none itself; no effect where it cannot."""
    global _forks_here
    _forks_here = can_fork()


def build(step: Step) -> None:
    """Build the model of a step in a process that will be forked. Raises what the function of the step raises."""
    with autograd_engine.without_backward():
        built_model(step)


def forks_here() -> bool:
    """Return whether `Lanes` fork from this process."""
    return _forks_here


def _fork() -> int:
    # The other threads wait for the end of the parent process and of this one.
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        return os.fork()


def _end(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError, ChildProcessError):
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)


def end_here() -> None:
    """Kill this process."""
    # The exit functions are those of the process that was forked.
    os.kill(os.getpid(), signal.SIGKILL)


def _serve_step(connections: list[Connection], packed_step: bytes, settings: bytes, forks: bool) -> None:
    """Unpack a step and fork a process for every connection; without forks there is one connection, served here."""
    workers.initialize_worker()
    workers.set_process_settings(cloudpickle.loads(settings))
    try:
        step: Step | None
        step = workers.unpack_step(packed_step)
        build(step)
    except Exception:
        # Every run raises the error.
        step = None
    given = packed_step if step is None else step
    if not forks:
        _serve(connections[0], given)
        return
    children: list[int] = []

    def end(*_: Any) -> None:
        for pid in children:
            _end(pid)
        end_here()

    signal.signal(signal.SIGTERM, end)
    gc.freeze()
    for number, connection in enumerate(connections):
        pid = _fork()
        if pid == 0:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            for other in connections[number + 1 :]:
                other.close()
            _serve_and_exit(connection, given)
        children.append(pid)
        connection.close()
    parent = multiprocessing.parent_process()
    if parent is not None:
        multiprocessing.connection.wait([parent.sentinel])
    end()


def _serve_and_exit(connection: Connection, step: Step | bytes) -> None:
    """Serve a connection in a forked process, and end the process without the exit functions of its parent."""
    try:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        # Raises where torch refuses a backward pass here; the other end then runs the settings itself.
        autograd_engine.sole_owner_counts()
        _serve(connection, step)
    finally:
        end_here()


def _serve(connection: Connection, step: Step | bytes) -> None:
    """Send that this process is ready, then the result of every request, until the other end is closed."""
    with contextlib.suppress(EOFError, OSError):
        connection.send_bytes(_READY)
        while True:
            request = connection.recv_bytes()
            connection.send_bytes(workers.run_packed(step, request))
