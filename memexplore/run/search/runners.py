"""Runners of settings: in this process, in worker processes as soon as these save time, or on an executor.

A runner takes settings at any time and gives back their results, in the order in which the runs end.
"""

from __future__ import annotations

import concurrent.futures
import dataclasses
import enum
import multiprocessing.connection
import os
import pickle
import socket
import threading
import time
from collections import deque
from collections.abc import Generator, Iterable
from concurrent.futures import BrokenExecutor, Executor, Future, ThreadPoolExecutor
from typing import Any, NamedTuple, Protocol

import cloudpickle

from memexplore.run.code.lines import recorded_sites
from memexplore.run.knobs.knobs import Knobs
from memexplore.run.machine import Machine
from memexplore.run.programs.packing import UnsendableStepError, unpacked
from memexplore.run.programs.step import Step
from memexplore.run.run import Program, Want, run
from memexplore.run.search.process_settings import process_settings, with_process_settings
from memexplore.run.search.results import Done, Failed, Result, sendable, without_frames
from memexplore.run.search.workers import Worker, Workers, processor_count

_SECONDS_TO_START = 8.0
"""Seconds, at most, from the start of workers until each has imported torch and run its first setting."""
_SUBMITTED = 64
"""Settings submitted to an executor at once: enough to keep many workers busy, few to be cancelled."""


class Request(NamedTuple):
    """A request for a run."""

    knobs: Knobs
    machine: Machine
    want: Want


class Runner(Protocol):
    """Runs settings of one program on one machine."""

    def submit(self, settings: Iterable[Knobs]) -> None:
        """Have settings run."""

    def next_result(self) -> Result:
        """Wait for the next of the settings that ends; at least one was submitted whose result was not returned."""

    def close(self) -> None:
        """Drop the settings that have not ended, and end the processes."""


def runner_of(step: Step, machine: Machine, executor: Executor | None, want: Want, expected_runs: int) -> Runner:
    """Return the runner for a step; raises as `sweep` does. `expected_runs` is how many runs there will be in all."""
    if executor is None:
        return LocalRunner(step, machine, want, expected_runs)
    if not machine.is_virtual:
        raise TypeError("a real device runs one setting after another, in this process: leave executor out")
    if isinstance(executor, ThreadPoolExecutor):
        raise TypeError(
            "a sweep cannot run in threads, as the virtual GPU is process-wide: leave executor out, or give one with "
            "processes of its own such as concurrent.futures.ProcessPoolExecutor"
        )
    return _ExecutorRunner(step, machine, want, executor)


class OneByOne:
    """Runs a setting in this process whenever its result is asked for."""

    def __init__(self, program: Program, machine: Machine, want: Want) -> None:
        self._program, self._machine, self._want = program, machine, want
        self.waiting: deque[Knobs] = deque()

    def submit(self, settings: Iterable[Knobs]) -> None:
        """Have settings run."""
        self.waiting.extend(settings)

    def next_result(self) -> Result:
        """Run the next setting."""
        knobs = self.waiting.popleft()
        try:
            return Done(run(self._program, knobs, self._machine, self._want))
        except Exception as error:
            return Failed(knobs, without_frames(error))

    def close(self) -> None:
        """Drop the settings that wait."""
        self.waiting.clear()


# --- worker processes -----------------------------------------------------------------------------------------------


@dataclasses.dataclass
class _Work:
    """What a worker runs, and what it has run before."""

    running: Knobs | None = None
    traced: set[Knobs] = dataclasses.field(default_factory=set)
    """Settings that were run there, without the allocator's settings: with other ones they take no run."""
    code: set[Knobs] = dataclasses.field(default_factory=set)
    """The same without batch and input size: with other ones they take half a run."""

    def begin(self, knobs: Knobs) -> None:
        self.running = knobs
        self.traced.add(_trace(knobs))
        self.code.add(_code(knobs))


def _trace(knobs: Knobs) -> Knobs:
    return knobs.replace(settings=None)


def _code(knobs: Knobs) -> Knobs:
    return knobs.replace(settings=None, batch=None, input_size=None)


class Origin(enum.Enum):
    """Where the workers of a `LocalRunner` come from."""

    FRESH = "fresh processes, once they save time"
    FORKED = "forks of this process, which runs no setting itself"


class LocalRunner:
    """Runs settings in this process, and in workers as soon as starting these saves time.

    While the workers start, settings run here. Where a worker dies, the setting that it ran is run again when no other
    runs, and fails if that worker dies as well.
    """

    def __init__(
        self, step: Step, machine: Machine, want: Want, expected_runs: int, origin: Origin = Origin.FRESH
    ) -> None:
        """`expected_runs` is how many runs there will be in all."""
        self._step, self._machine, self._want = step, machine, want
        self._here = OneByOne(step, machine, want)
        self._waiting = self._here.waiting
        self._ended: deque[Result] = deque()
        self._interrupted: deque[Knobs] = deque()
        """Settings whose worker has died."""
        self._expected_runs, self._origin = expected_runs, origin
        # Weights are not sent, and a second process on a real GPU would take memory from the first.
        self._count = 1 if not machine.is_virtual else processor_count()
        self._seconds: list[float] = []
        """Seconds that each run in this process took."""
        self._workers: Workers | None = None
        self._work: dict[Worker, _Work] = {}
        """The workers that have not died."""
        self._started = 0.0

    def submit(self, settings: Iterable[Knobs]) -> None:
        """Have settings run."""
        self._waiting.extend(settings)
        self._assign()

    def next_result(self) -> Result:
        """Wait for the next setting that ends."""
        while not self._ended:
            if not self._waiting and all(work.running is None for work in self._work.values()):
                self._run_alone(self._interrupted.popleft())
            elif self._workers is not None or self._start_if_faster():
                self._run_in_workers()
            else:
                self._run_here()
        return self._ended.popleft()

    def close(self) -> None:
        """End the workers, and drop what has not ended."""
        self._here.close()
        self._close_workers()

    def _run_here(self) -> None:
        start = time.monotonic()
        self._ended.append(self._here.next_result())
        self._seconds.append(time.monotonic() - start)

    def _run_alone(self, knobs: Knobs) -> None:
        """Run a setting in a worker of its own."""
        self._start(1)
        (worker,) = self._work
        try:
            worker.wait_until_ready()
            worker.send(Request(knobs, self._machine, self._want))
            self._ended.append(worker.receive())
        except (EOFError, OSError):
            self._ended.append(Failed(knobs, RuntimeError(f"the process that ran {knobs} died")))
        self._close_workers()

    def _start_if_faster(self) -> bool:
        """Start workers if that saves time; return whether they were."""
        if self._count < 2 or not (self._origin is Origin.FORKED or self._saves_time()):
            return False
        try:
            self._start(self._count)
        except UnsendableStepError:
            # The step runs here: slower, with the same results.
            self._count = 1
        return self._workers is not None

    def _saves_time(self) -> bool:
        if len(self._seconds) < 2:
            return False
        remaining = max(self._expected_runs - len(self._seconds), len(self._waiting))
        at_once = min(self._count, remaining)
        # The first run makes plans that later runs reuse, so the last one predicts them best. A single run is not
        # faster in another process.
        return at_once > 1 and remaining * self._seconds[-1] * (1 - 1 / at_once) > _SECONDS_TO_START

    def _start(self, count: int) -> None:
        packed = b"" if self._origin is Origin.FORKED else self._step.packed()
        self._close_workers()
        self._workers = workers = Workers(_answer)
        if self._origin is Origin.FORKED:
            workers.fork(self._step, count)
        else:
            # The caller waits for them, so they have its priority.
            workers.start(count, niceness=0)
            workers.give(packed, process_settings())
        self._work, self._started = {worker: _Work() for worker in workers.all}, time.monotonic()

    def _close_workers(self) -> None:
        if self._workers is not None:
            self._workers.close()
        self._workers, self._work = None, {}

    def _run_in_workers(self) -> None:
        """Give settings to the workers, and receive what has ended; wait where no setting can be run here meanwhile."""
        self._assign()
        is_starting = not any(worker.is_ready for worker in self._work)
        runs_here = is_starting and self._origin is Origin.FRESH and self._is_early and bool(self._waiting)
        if runs_here:
            self._run_here()
        workers: dict[Any, Worker] = {worker.connection: worker for worker in self._work}
        for connection in multiprocessing.connection.wait(list(workers), 0 if runs_here or not workers else None):
            self._receive(workers[connection])
        # Workers go on while the caller looks at the results.
        self._assign()
        if not self._work:
            self._close_workers()
            if is_starting:
                # They died before they took a request: the rest runs here.
                self._count = 1

    @property
    def _is_early(self) -> bool:
        return time.monotonic() - self._started < _SECONDS_TO_START

    def _receive(self, worker: Worker) -> None:
        try:
            if worker.is_ready:
                self._ended.append(worker.receive())
                self._work[worker].running = None
            else:
                worker.wait_until_ready()
        except (EOFError, OSError):
            self._lose(worker)

    def _lose(self, worker: Worker) -> None:
        """Forget a worker that has died."""
        knobs = self._work.pop(worker).running
        if knobs is not None:
            self._interrupted.append(knobs)

    def _assign(self) -> None:
        """Give every worker that runs nothing its next setting."""
        for worker, work in list(self._work.items()):
            if not worker.is_ready or work.running is not None or (knobs := self._next_for(work)) is None:
                continue
            work.begin(knobs)
            try:
                worker.send(Request(knobs, self._machine, self._want))
            except OSError:
                self._lose(worker)

    def _next_for(self, work: _Work) -> Knobs | None:
        """Remove and return the setting that a worker runs next, None for none.

        First the settings that take less time there; then those that no other worker has traces of.
        """
        others = [other for other in self._work.values() if other is not work]

        def rank(knobs: Knobs) -> int | None:
            if _trace(knobs) in work.traced:
                return 0
            if any(_trace(knobs) in other.traced for other in others):
                return None
            if _code(knobs) in work.code:
                return 1
            return 3 if any(_code(knobs) in other.code for other in others) else 2

        ranks = {knobs: number for knobs in self._waiting if (number := rank(knobs)) is not None}
        if not ranks:
            return None
        chosen = min(ranks, key=lambda knobs: ranks[knobs])
        self._waiting.remove(chosen)
        return chosen


def _answer(program: Step | bytes, request: Request) -> Generator[Result, None, None]:
    """Run a setting, in a worker."""
    try:
        step: Step = unpacked(program)
        yield Done(run(step, *request), recorded_sites(step, request.knobs))
    except (Exception, SystemExit) as error:
        yield Failed(request.knobs, sendable(without_frames(error)))


# --- executors ------------------------------------------------------------------------------------------------------


class _ExecutorRunner:
    """Runs settings on an executor that the caller gave."""

    def __init__(self, step: Step, machine: Machine, want: Want, executor: Executor) -> None:
        self._packed, self._machine, self._want, self._executor = step.packed(), machine, want, executor
        self._settings = process_settings()
        self._waiting: deque[Knobs] = deque()
        self._running: dict[Future[bytes], Knobs] = {}

    def submit(self, settings: Iterable[Knobs]) -> None:
        self._waiting.extend(settings)

    def next_result(self) -> Result:
        while self._waiting and len(self._running) < _SUBMITTED:
            knobs = self._waiting.popleft()
            request = Request(knobs, self._machine, self._want), self._settings, _this_process(), threading.get_ident()
            try:
                future = self._executor.submit(run_on_executor, self._packed, cloudpickle.dumps(request))
            except BrokenExecutor as error:
                return Failed(knobs, error)
            self._running[future] = knobs
        done, _ = concurrent.futures.wait(self._running, return_when=concurrent.futures.FIRST_COMPLETED)
        future = next(future for future in self._running if future in done)
        knobs, failure = self._running.pop(future), future.exception()
        if failure is not None:
            return Failed(knobs, failure)
        result: Result | TypeError = pickle.loads(future.result())
        if isinstance(result, TypeError):
            raise result
        return result

    def close(self) -> None:
        self._waiting.clear()
        for future in self._running:
            future.cancel()


def _this_process() -> tuple[str, int]:
    return socket.gethostname(), os.getpid()


_one_at_a_time = threading.Lock()
"""Dask gives a worker several threads, and the virtual GPU is process-wide."""


def run_on_executor(packed: bytes, packed_request: bytes) -> bytes:
    """Run a setting of a packed step, in a worker of an executor, and return the packed `Result`.

    It is a TypeError in another thread of the process that asked for it, as the virtual GPU is process-wide.
    """
    request, settings, process, thread = pickle.loads(packed_request)
    if process == _this_process() and thread != threading.get_ident():
        refusal = TypeError(
            "this executor runs threads of the calling process, and the virtual GPU is process-wide: use one with "
            "processes of its own (ProcessPoolExecutor; Dask with processes=True)"
        )
        return pickle.dumps(refusal)
    with _one_at_a_time, with_process_settings(settings):
        (result,) = _answer(packed, request)
    return cloudpickle.dumps(result)
