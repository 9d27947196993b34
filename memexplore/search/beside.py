"""A search in a process of its own. In: a step and a GPU. Out: the advice so far after every run, then all of it.

The caller goes on meanwhile: the virtual GPU is process-wide, so that a thread of this process could not search.
"""

from __future__ import annotations

import atexit
import contextlib
import dataclasses
import importlib
import multiprocessing
import multiprocessing.connection
import os
import pickle
import signal
import sys
import threading
import time
import weakref
from collections.abc import Callable
from multiprocessing.connection import Connection
from multiprocessing.context import SpawnProcess
from typing import Any, NamedTuple

import cloudpickle
import torch

from memexplore import targets
from memexplore.analysis.tables import is_users
from memexplore.knobs.knobs import Knobs
from memexplore.search import lanes, workers
from memexplore.search.advice import Advice
from memexplore.search.advise import advise
from memexplore.search.cell_copy import CellCopy
from memexplore.search.cell_search import advise_cell
from memexplore.search.progress import Progress
from memexplore.steps.step import Step
from memexplore.tape import Os
from memexplore.virtual_gpu.tensors.tensor import fake_mode

_TIME_TO_EXIT = 2.0
"""Seconds that a stopped search has to end, before the exception is raised again."""
_ATTEMPTS = 2
"""Further exceptions before the process of a stopped search is killed."""
_NICENESS = 5
"""Lower priority of the search than that of the process that started it, in whose notebook cells run."""


class Found(NamedTuple):
    """The state of a search after a run."""

    progress: Progress
    advice: Advice | None
    """None before the step as written was run."""


class Ended(NamedTuple):
    """The end of a search: its advice, or the error that ended it."""

    advice: Advice | None
    error: BaseException | None


Report = Callable[[Found | Ended], object]


class SearchProcess:
    """A search that runs in a process of its own, and in worker processes of that one.

    The step may be packed already, or be a packed `CellCopy`. `report` is called in a thread with each `Found`, and
    once with `Ended`. The process gets `settings`, by default those of this process. For the other arguments see
    `advise`.

    Raises `workers.UnsendableStepError` for a step that cannot be sent to another process.
    """

    def __init__(
        self,
        step: Step | bytes,
        gpu: str,
        report: Report,
        *,
        release: str | None,
        os: str = Os.LINUX,
        base: Knobs | None = None,
        settings: workers.ProcessSettings | None = None,
    ) -> None:
        packed = step if isinstance(step, bytes) else workers.pack_step(step)
        wanted = (settings or workers.process_settings(None))._replace(os=os)
        wanted = wanted if release is None else wanted._replace(release=release)
        request = cloudpickle.dumps((gpu, base, wanted))
        self._report = report
        self._is_stopped = False
        self._process, self._connection = _take_prepared() or _started()
        _running.add(self)
        threading.Thread(
            target=self._communicate, args=(packed, request), name="memexplore-search", daemon=True
        ).start()

    def stop(self) -> None:
        """End the search without a further report."""
        self._is_stopped = True
        self._process.terminate()

    def _communicate(self, packed_step: bytes, request: bytes) -> None:
        event: Found | Ended = Ended(None, RuntimeError("the process of the search died"))
        with contextlib.suppress(EOFError, OSError):
            # In this thread: a process that has just been started reads it after some seconds only.
            self._connection.send_bytes(packed_step)
            self._connection.send_bytes(request)
            while True:
                event = _unpacked(self._connection.recv_bytes())
                if self._is_stopped or isinstance(event, Ended):
                    break
                self._report(event)
                event = Ended(None, RuntimeError("the process of the search died"))
        if not self._is_stopped:
            self._report(event)
        self._connection.close()
        self._process.join()
        _running.discard(self)


def _started(modules: tuple[str, ...] = ()) -> tuple[SpawnProcess, Connection]:
    """Start the process of a search, which imports modules and waits for its step."""
    mine, its = multiprocessing.Pipe()
    process = workers.new_process(_search, (its, modules))
    process.start()
    # The end of the process then ends the connection.
    its.close()
    return process, mine


# --- a process that waits for its search ----------------------------------------------------------------------------

_prepared: tuple[SpawnProcess, Connection] | None = None
_LEAST_MEMORY = 2 << 30
"""Free memory of the machine from which on a process may wait: it takes a quarter of a GiB, or half of one."""


def prepare() -> None:
    """Start the process of the next search now: it imports torch and libraries of models at low priority, and waits.

    These are the installed modules that define a class of layers in this process: to import `transformers` takes
    longer than to run a step. No effect where one waits already, or where the machine has little memory left.
    """
    global _prepared
    if _prepared is not None and _prepared[0].is_alive():
        return
    if targets.available_system_memory() >= _LEAST_MEMORY:
        _prepared = _started(installed_layers())


def installed_layers() -> tuple[str, ...]:
    """Return the modules of installed packages, other than torch, that define a class of layers in this process."""
    classes: dict[type[torch.nn.Module], None] = {}
    found: list[type[torch.nn.Module]] = [torch.nn.Module]
    while found:
        classes |= dict.fromkeys(found)
        found = [child for parent in found for child in parent.__subclasses__() if child not in classes]
    files = {name: getattr(sys.modules.get(name), "__file__", None) for name in {one.__module__ for one in classes}}
    return tuple(
        name
        for name, file in sorted(files.items())
        if file and not is_users(file) and name.partition(".")[0] not in ("torch", "memexplore")
    )


def _take_prepared() -> tuple[SpawnProcess, Connection] | None:
    global _prepared
    taken, _prepared = _prepared, None
    return taken if taken is not None and taken[0].is_alive() else None


_running: weakref.WeakSet[SearchProcess] = weakref.WeakSet()


@atexit.register
def _stop_all() -> None:
    # Python waits at its exit for processes that are no daemons; a daemon could not start the workers of a search.
    for search in list(_running):
        search.stop()
    if (waiting := _take_prepared()) is not None:
        waiting[0].terminate()


# --- in the process -------------------------------------------------------------------------------------------------


def _search(connection: Connection, modules: tuple[str, ...]) -> None:
    # An interrupt of a notebook reaches the whole process group; the parent stops the search itself.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    _end_when_terminated()
    try:
        _answer(connection, modules)
    finally:
        # The functions that torch runs at exit come next: Python would print an exception that is raised in them.
        signal.signal(signal.SIGTERM, signal.SIG_IGN)


def _answer(connection: Connection, modules: tuple[str, ...]) -> None:
    threading.Thread(target=end_with_parent, daemon=True).start()
    if hasattr(os, "nice"):
        os.nice(_NICENESS)
    torch.set_num_threads(1)
    # The first fake mode imports much of torch: a prepared process has done so when its step arrives.
    fake_mode()
    for name in modules:
        # Where a module cannot be imported here, the step says so.
        with contextlib.suppress(Exception):
            importlib.import_module(name)
    latest: Advice | None = None

    def found(advice: Advice) -> None:
        nonlocal latest
        latest = advice

    def report(progress: Progress) -> None:
        connection.send_bytes(_packed(Found(progress, latest)))

    try:
        packed_step, request = connection.recv_bytes(), connection.recv_bytes()
    except EOFError:
        return
    try:
        gpu, base, settings = pickle.loads(request)
        workers.set_process_settings(settings)
        lanes.fork_here()
        step: Step | CellCopy = pickle.loads(packed_step)
        device: dict[str, Any] = {"release": settings.release, "os": settings.os}
        if isinstance(step, CellCopy):
            advice = advise_cell(step, gpu, **device, progress=report, found=found)
        else:
            # Before `advise` builds the model: processes are forked from this one.
            lanes.build(step)
            advice = advise(step, gpu, **device, progress=report, found=found, base=base)
        ended = Ended(advice, None)
    except Exception as error:
        ended = Ended(None, workers.sendable(workers.without_frames(error)))
    connection.send_bytes(_packed(ended))


def _end_when_terminated() -> None:
    """Raise SystemExit at SIGTERM, which ends the workers and removes files on its way; else kill this process.

    The exception is lost where it is raised in a callback, such as that of a weak reference, or where a cell catches
    it. It is then raised again.
    """
    terminated = threading.Event()

    def raise_exit(*_: object) -> None:
        terminated.set()
        raise SystemExit(1)

    def insist() -> None:
        terminated.wait()
        for _ in range(_ATTEMPTS):
            time.sleep(_TIME_TO_EXIT)
            os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(_TIME_TO_EXIT)
        # The workers end when the connections to this process do.
        lanes.end_here()

    signal.signal(signal.SIGTERM, raise_exit)
    threading.Thread(target=insist, daemon=True).start()


def _unpacked(received: bytes) -> Found | Ended:
    try:
        event: Found | Ended = pickle.loads(received)
    except Exception as error:
        # Such as an exception whose class is in a module that only the process of the search found.
        return Ended(None, error)
    return event


def _packed(event: Found | Ended) -> bytes:
    advice = event.advice
    if advice is not None:
        errors = {knobs: workers.sendable(error) for knobs, error in advice.errors.items()}
        event = event._replace(advice=dataclasses.replace(advice, errors=errors))
    return cloudpickle.dumps(event)


def end_with_parent() -> None:
    """Wait for the end of the parent process, then end this one."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        multiprocessing.connection.wait([parent.sentinel])
        os.kill(os.getpid(), signal.SIGTERM)
