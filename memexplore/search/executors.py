"""Runners of settings: in this process, in processes started here, or on an executor given by the caller.

In: a step and settings. Out: a `Result` for each setting, in the order in which the runs end.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import pickle
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import BrokenExecutor, Executor, Future, ThreadPoolExecutor
from typing import Any

import cloudpickle

from memexplore import targets
from memexplore.knobs.knobs import Knobs
from memexplore.search import workers
from memexplore.search.workers import Done, Failed, Result
from memexplore.steps.outcome import RunSetting, run_outcome
from memexplore.steps.step import Step

_START = 8.0
"""Seconds from starting processes until each has imported torch and run its first setting."""
_WINDOW = 64
"""Settings submitted to an executor at once: enough to keep many workers busy, few to be cancelled."""


RunAll = Callable[[Iterable[Knobs]], Iterator[Result]]


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
        waiting = deque(settings)
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
    result: Result | TypeError = pickle.loads(future.result())
    if isinstance(result, TypeError):
        raise result
    return result


class _LocalRunner:
    """Runs settings in this process, and in processes of its own as soon as starting these saves time.

    A worker that dies breaks its pool. The settings that were running then are run again one by one, each in a pool of
    its own, which separates the setting that kills its worker from the others.
    """

    def __init__(
        self, step: Step, gpu: str, release: str | None, os: str, run_setting: RunSetting, expected_runs: int
    ) -> None:
        self._step, self._gpu, self._release, self._os, self._run_setting = step, gpu, release, os, run_setting
        self._expected_runs = expected_runs
        # Weights are not sent, and a second process on a real GPU would take memory from the first.
        self._count = 1 if targets.is_real(gpu) else workers.processor_count()
        self._seconds: list[float] = []
        self._can_pack_step = True
        self._pool: Any = None
        self._runner: _ExecutorRunner | None = None

    def close(self) -> None:
        """End the processes."""
        if self._pool is not None:
            workers.terminate_pool(self._pool)
            self._pool = self._runner = None

    def run_all(self, settings: Iterable[Knobs]) -> Iterator[Result]:
        waiting = deque(settings)
        self._expected_runs = max(self._expected_runs, len(waiting))
        while waiting and not self._has_processes():
            yield self._run_here(waiting.popleft())
        while waiting:
            yield from self._run_in_processes(waiting)

    def _has_processes(self) -> bool:
        """Whether processes run; starts them if that saves time."""
        if self._runner is not None:
            return True
        if len(self._seconds) < 2 or not self._can_pack_step:
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
            self._can_pack_step = False
        return self._can_pack_step

    def _start(self, count: int) -> None:
        self.close()
        self._pool = workers.spawn_pool(count)
        self._runner = _ExecutorRunner(self._step, self._gpu, self._release, self._os, self._run_setting, self._pool)

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
        """Run settings until none waits or a worker has died."""
        assert self._runner is not None
        running: dict[Future[bytes], Knobs] = {}
        interrupted: list[Knobs] = []
        while (waiting or running) and not interrupted:
            while waiting and len(running) < self._count + 1:
                try:
                    future = self._runner.submit(waiting[0])
                except BrokenExecutor:
                    interrupted.append(waiting.popleft())
                    break
                running[future] = waiting.popleft()
            done, _ = concurrent.futures.wait(running, return_when=concurrent.futures.FIRST_COMPLETED)
            for future in [one for one in running if one in done]:
                knobs = running.pop(future)
                if isinstance(future.exception(), BrokenExecutor):
                    interrupted.append(knobs)
                else:
                    yield _result(future, knobs)
        if not interrupted:
            return
        interrupted += running.values()
        for knobs in interrupted:
            self._start(1)
            future = self._runner.submit(knobs)
            result = _result(future, knobs)
            if isinstance(result, Failed) and isinstance(result.error, BrokenExecutor):
                result = Failed(knobs, RuntimeError(f"the process that ran {knobs} died"))
            yield result
        self._start(self._count)
