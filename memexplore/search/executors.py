"""Runners of settings: in this process, in processes started here, or on an executor given by the caller.

In: a step and settings. Out: a `Result` for each setting, in the order in which the runs end.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import multiprocessing.connection
import pickle
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import BrokenExecutor, Executor, Future, ThreadPoolExecutor
from typing import Any

import cloudpickle

from memexplore import targets
from memexplore.knobs.knobs import Knobs
from memexplore.search import lanes, workers
from memexplore.search.lanes import Lane, Lanes, next_for
from memexplore.search.workers import Done, Failed, Result
from memexplore.steps.outcome import RunSetting, run_outcome
from memexplore.steps.step import Step

_START = 8.0
"""Seconds, at most, from the start of processes until each has imported torch and run its first setting."""
_WINDOW = 64
"""Settings submitted to an executor at once: enough to keep many workers busy, few to be cancelled."""


RunAll = Callable[[Iterable[Knobs]], Iterator[Result]]
"""Runs settings; to those of a deque the caller may add more until the last result."""


@contextlib.contextmanager
def open_runner(
    step: Step,
    *,
    gpu: str,
    release: str | None,
    os: str,
    executor: Executor | None,
    expected_runs: int,
    run_setting: RunSetting = run_outcome,
) -> Iterator[RunAll]:
    """Yield a function that runs settings and may be called again with the same workers; they end with the block.

    `expected_runs` is the number of settings in all, by which the runner decides whether to start processes;
    `run_setting` is a function that a worker can import. Raises as `sweep` does.
    """
    targets.gpu_of(gpu)
    if targets.is_real(gpu) and executor is not None:
        raise TypeError("a real device runs one setting after another, in this process: leave executor out")
    if isinstance(executor, ThreadPoolExecutor):
        raise TypeError(
            "a sweep cannot run in threads, as the virtual GPU is process-wide: leave executor out, or give one with "
            "processes of its own such as concurrent.futures.ProcessPoolExecutor"
        )
    if executor is not None:
        yield _ExecutorRunner(step, gpu, release, os, run_setting, executor).run_all
        return
    runner = _LocalRunner(step, gpu, release, os, run_setting, expected_runs)
    try:
        yield runner.run_all
    finally:
        runner.close()


class _ExecutorRunner:
    """Runs settings on an executor."""

    def __init__(
        self, step: Step, gpu: str, release: str | None, os: str, run_setting: RunSetting, executor: Executor
    ) -> None:
        self._packed_step = workers.pack_step(step)
        self._arguments = (gpu, run_setting, workers.process_settings(release, os), workers.this_thread())
        # Like a step that cannot be sent, a function that cannot be sent raises a TypeError here, not at its first run.
        cloudpickle.dumps(self._arguments)
        self._executor = executor

    def submit(self, knobs: Knobs) -> Future[bytes]:
        request = cloudpickle.dumps((knobs, *self._arguments))
        return self._executor.submit(workers.run_packed, self._packed_step, request)

    def run_all(self, settings: Iterable[Knobs]) -> Iterator[Result]:
        waiting = settings if isinstance(settings, deque) else deque(settings)
        running: dict[Future[bytes], Knobs] = {}
        try:
            while waiting or running:
                while waiting and len(running) < _WINDOW:
                    knobs = waiting.popleft()
                    try:
                        running[self.submit(knobs)] = knobs
                    except BrokenExecutor as error:
                        yield Failed(knobs, error)
                done, _ = concurrent.futures.wait(running, return_when=concurrent.futures.FIRST_COMPLETED)
                for future in [one for one in running if one in done]:
                    yield _result(future, running.pop(future))
        finally:
            for future in running:
                future.cancel()


def _result(future: Future[bytes], knobs: Knobs) -> Result:
    error = future.exception()
    if error is not None:
        return Failed(knobs, error)
    return _received(future.result())


class _LocalRunner:
    """Runs settings in this process, and in processes of its own as soon as starting these saves time.

    While the processes start, settings run here. If one dies, the setting that it ran is run again in a process of its
    own, and fails if that dies as well.
    """

    def __init__(
        self, step: Step, gpu: str, release: str | None, os: str, run_setting: RunSetting, expected_runs: int
    ) -> None:
        self._step, self._gpu, self._release, self._os, self._run_setting = step, gpu, release, os, run_setting
        self._expected_runs = expected_runs
        # Weights are not sent, and a second process on a real GPU would take memory from the first.
        self._count = 1 if targets.is_real(gpu) else workers.processor_count()
        self._seconds: list[float] = []
        self._can_send_step = True
        self._lanes: Lanes | None = None
        self._started = 0.0
        self._arguments: tuple[Any, ...] = ()

    def close(self) -> None:
        """End the processes."""
        if self._lanes is not None:
            self._lanes.close()
            self._lanes = None

    def run_all(self, settings: Iterable[Knobs]) -> Iterator[Result]:
        waiting = settings if isinstance(settings, deque) else deque(settings)
        self._expected_runs = max(self._expected_runs, len(waiting))
        while waiting:
            if self._has_processes():
                yield from self._run_in_processes(waiting)
            else:
                yield self._run_here(waiting.popleft())

    def _has_processes(self) -> bool:
        """Whether processes run or start; starts them if that saves time."""
        if self._lanes is not None:
            return True
        if not self._can_send_step or self._count < 2:
            return False
        if not lanes.forks_here():
            if len(self._seconds) < 2:
                return False
            remaining = self._expected_runs - len(self._seconds)
            at_once = min(self._count, remaining)
            # A single run is not faster in another process.
            if at_once < 2:
                return False
            # The first run makes plans that later runs reuse, so the last one predicts them best.
            saved = remaining * self._seconds[-1] * (1 - 1 / at_once)
            if saved <= _START:
                return False
        try:
            self._start(self._count)
        except TypeError:
            # A step that cannot be sent runs here: slower, with the same results.
            self._can_send_step = False
        return self._can_send_step

    def _start(self, count: int) -> None:
        self.close()
        settings = workers.process_settings(self._release, self._os)
        self._arguments = (self._gpu, self._run_setting, settings, workers.this_thread())
        # A function that cannot be sent raises a TypeError here, not at its first run.
        cloudpickle.dumps(self._arguments)
        self._lanes = Lanes(self._step, count, settings)
        self._started = time.monotonic()

    def _run_here(self, knobs: Knobs) -> Result:
        start = time.monotonic()
        try:
            outcome = self._run_setting(self._step, knobs, gpu=self._gpu, release=self._release, os=self._os)
            return Done(*outcome)
        except Exception as error:
            return Failed(knobs, workers.without_frames(error))
        finally:
            self._seconds.append(time.monotonic() - start)

    def _run_in_processes(self, waiting: deque[Knobs]) -> Iterator[Result]:
        """Run settings until none waits or a process has died."""
        interrupted: list[Knobs] = []
        while (waiting or self._running()) and not interrupted:
            interrupted += self._assign(waiting)
            if waiting and self._goes_on_here():
                yield self._run_here(waiting.popleft())
            wait_for = {lane.connection: lane for lane in self._all()}
            for connection in multiprocessing.connection.wait(list(wait_for), 0 if self._goes_on_here() else None):
                lane = wait_for[connection]  # type: ignore[index]
                knobs = lane.running
                try:
                    received = lane.receive()
                except (EOFError, OSError):
                    interrupted += [] if knobs is None else [knobs]
                    self._all().remove(lane)
                    continue
                # The process goes on while the caller looks at the result.
                interrupted += self._assign(waiting)
                if received is not None and knobs is not None:
                    yield _received(received)
            if not self._all():
                break
        if interrupted:
            interrupted += self._running()
            for knobs in interrupted:
                self._start(1)
                yield self._run_alone(knobs)
            self._start(self._count)
        elif not self._all():
            # They died before their first setting: the rest runs here.
            self._can_send_step = False
            self.close()

    def _all(self) -> list[Lane]:
        return [] if self._lanes is None else self._lanes.lanes

    def _running(self) -> list[Knobs]:
        return [lane.running for lane in self._all() if lane.running is not None]

    def _goes_on_here(self) -> bool:
        """Whether settings run in this process: while the others start, unless they fork from it."""
        if lanes.forks_here() or any(lane.is_ready for lane in self._all()):
            return False
        return time.monotonic() - self._started < _START

    def _assign(self, waiting: deque[Knobs]) -> list[Knobs]:
        """Give every process that runs nothing its next setting; return the settings of those that have died."""
        died: list[Knobs] = []
        for lane in list(self._all()):
            if lane.is_ready and lane.running is None and (knobs := next_for(lane, waiting, self._all())) is not None:
                try:
                    lane.send(knobs, cloudpickle.dumps((knobs, *self._arguments)))
                except OSError:
                    died.append(knobs)
                    self._all().remove(lane)
        return died

    def _run_alone(self, knobs: Knobs) -> Result:
        (lane,) = self._all()
        try:
            lane.receive()
            lane.send(knobs, cloudpickle.dumps((knobs, *self._arguments)))
            received = lane.receive()
        except (EOFError, OSError):
            return Failed(knobs, RuntimeError(f"the process that ran {knobs} died"))
        assert received is not None
        return _received(received)


def _received(received: bytes) -> Result:
    result: Result | TypeError = pickle.loads(received)
    if isinstance(result, TypeError):
        raise result
    return result
