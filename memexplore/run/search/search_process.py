"""A search beside the caller: in a process of its own, which reports the advice so far after every run.

The caller goes on meanwhile: the virtual GPU is process-wide, so that a thread of this process could not search.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import importlib
import sys
import threading
from collections.abc import Callable, Generator, Iterator
from typing import NamedTuple

import torch

from memexplore.analysis.tables import is_users
from memexplore.run.knobs.knobs import Knobs
from memexplore.run.machine import Machine, available_system_memory
from memexplore.run.programs.cell import Cell
from memexplore.run.programs.packing import unpacked
from memexplore.run.programs.script import Script
from memexplore.run.programs.step import Step
from memexplore.run.run import Want
from memexplore.run.search import workers
from memexplore.run.search.advice import Advice
from memexplore.run.search.advise import BUDGET, StepSearch
from memexplore.run.search.loop_search import LoopSearch
from memexplore.run.search.process_settings import ProcessSettings, process_settings
from memexplore.run.search.progress import Progress
from memexplore.run.search.results import sendable, without_frames
from memexplore.run.search.runners import LocalRunner, OneByOne, Origin, Runner
from memexplore.run.search.searching import Search, run_all
from memexplore.run.search.workers import Worker, Workers
from memexplore.virtual_gpu.tensors.fake_tensors import fake_mode


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
_SECONDS_TO_END = 10.0
"""Seconds that a search has to end when it is stopped, before its process is killed."""


def events_of(search: Search, runner: Runner) -> Generator[Found | Ended, None, None]:
    """Run a search, and yield its state after each run and then its end; each call of `next` takes one run or none."""
    try:
        with contextlib.closing(runner):
            for _ in run_all(search, runner):
                yield Found(search.progress(), search.advice())
    except Exception as error:
        yield Ended(None, without_frames(error))
    else:
        yield Ended(search.advice(), None)


class SearchProcess:
    """A search that runs in a process of its own, and in worker processes of that one.

    A program may be packed already. `report` is called in a thread with each `Found`, and once with `Ended`. The
    process gets `settings`, by default those of this process. For the other arguments see `advise`.

    Raises `UnsendableStepError` or `UnsendableCellError` for a program that cannot be sent to another process.
    """

    def __init__(
        self,
        program: Step | Cell | Script | bytes,
        machine: Machine,
        report: Report,
        *,
        base: Knobs | None = None,
        settings: ProcessSettings | None = None,
    ) -> None:
        packed = program if isinstance(program, bytes) else program.packed()
        self._report = report
        self._is_stopped = False
        self._workers = _take_prepared() or _started()
        self._workers.give(packed, settings or process_settings())
        threading.Thread(target=self._receive, args=((machine, base),), name="memexplore-search", daemon=True).start()

    def stop(self) -> None:
        """End the search without a further report."""
        self._is_stopped = True
        self._workers.stop()
        # A program may have a handler of its own for the signal.
        killing = threading.Timer(_SECONDS_TO_END, self._workers.kill)
        killing.daemon = True
        killing.start()

    def _receive(self, request: tuple[Machine, Knobs | None]) -> None:
        (worker,) = self._workers.all
        for event in _received(worker, request):
            if not self._is_stopped:
                self._report(event)
            if isinstance(event, Ended):
                break
        self._workers.stop()
        self._workers.join()
        self._workers.close()


def _received(worker: Worker, request: tuple[Machine, Knobs | None]) -> Iterator[Found | Ended]:
    try:
        worker.wait_until_ready()
        worker.send(request)
        while True:
            yield worker.receive()
    except (EOFError, OSError):
        yield Ended(None, RuntimeError("the process of the search died"))
    except Exception as error:
        # Such as an exception whose class is in a module that only the process of the search found.
        yield Ended(None, error)


def _started(modules: tuple[str, ...] = ()) -> Workers:
    """Start the process of a search, which imports modules and waits for its step."""
    started = Workers(_answer)
    started.start(before=functools.partial(_import, modules))
    return started


# --- a process that waits for its search ----------------------------------------------------------------------------

_prepared: Workers | None = None
_LEAST_MEMORY = 2 << 30
"""Free memory of the machine from which on a process may wait: it takes a quarter of a GiB, or half of one."""


def prepare() -> None:
    """Start the process of the next search now: it imports torch and libraries of models at low priority, and waits.

    These are the installed modules that define a class of layers in this process: to import `transformers` takes
    longer than to run a step. No effect where one waits already, or where the machine has little memory left.
    """
    global _prepared
    if _prepared is not None and _prepared.are_alive:
        return
    if available_system_memory() >= _LEAST_MEMORY:
        _prepared = _started(installed_layers())


def installed_layers() -> tuple[str, ...]:
    """Return the modules of installed packages, other than torch, that define a class of layers in this process."""
    classes: dict[type[torch.nn.Module], None] = {}
    new: list[type[torch.nn.Module]] = [torch.nn.Module]
    while new:
        classes |= dict.fromkeys(new)
        new = [child for parent in new for child in parent.__subclasses__() if child not in classes]
    files = {name: getattr(sys.modules.get(name), "__file__", None) for name in {one.__module__ for one in classes}}
    return tuple(
        name
        for name, file in sorted(files.items())
        if file and not is_users(file) and name.partition(".")[0] not in ("torch", "memexplore")
    )


def _take_prepared() -> Workers | None:
    global _prepared
    taken, _prepared = _prepared, None
    return taken if taken is not None and taken.are_alive else None


# --- in the process -------------------------------------------------------------------------------------------------


def _import(modules: tuple[str, ...]) -> None:
    # The first fake mode imports much of torch: a prepared process has done so when its step arrives.
    fake_mode()
    for name in modules:
        # Where a module cannot be imported here, the step says so.
        with contextlib.suppress(Exception):
            importlib.import_module(name)


def _answer(packed: bytes, request: tuple[Machine, Knobs | None]) -> Generator[Found | Ended, None, None]:
    machine, base = request
    try:
        search, runner = _search(unpacked(packed), machine, base)
    except Exception as error:
        yield _sendable(Ended(None, without_frames(error)))
        return
    with contextlib.closing(events_of(search, runner)) as events:
        for event in events:
            yield _sendable(event)


def _search(program: Step | Cell | Script, machine: Machine, base: Knobs | None) -> tuple[Search, Runner]:
    if isinstance(program, Cell | Script):
        return LoopSearch(program, machine, base), OneByOne(program, machine, Want.TAPE)
    origin = Origin.FRESH
    if workers.can_fork():
        # Before the search does, as processes are forked from this one.
        workers.build(program)
        origin = Origin.FORKED
    search = StepSearch(program, machine, base=base)
    return search, LocalRunner(program, search.machine, Want.NUMBERS, BUDGET, origin)


def _sendable(event: Found | Ended) -> Found | Ended:
    advice = event.advice
    if advice is not None:
        errors = {knobs: sendable(error) for knobs, error in advice.errors.items()}
        event = event._replace(advice=dataclasses.replace(advice, errors=errors))
    if isinstance(event, Ended) and event.error is not None:
        event = event._replace(error=sendable(event.error))
    return event
