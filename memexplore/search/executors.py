"""Settings run one after another: in this process, in processes of its own, or on an executor that somebody gave."""

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
"""Seconds that spawned processes need until each has imported torch and run its first setting."""
_WINDOW = 64
"""Settings handed to an executor at once: enough to keep many workers busy, few to be cancelled."""


RunAll = Callable[[Iterable[Knobs]], Iterator[Result]]


@contextlib.contextmanager
def running(
    step: Step,
    *,
    gpu: str,
    release: str | None,
    executor: Executor | None,
    expected: int,
    run_setting: RunSetting = run_outcome,
) -> Iterator[RunAll]:
    """A function that runs some settings, again and again with the same workers; `expected` is how many in all.

    `run_setting` is how each is run, a function that can be imported. Raises as `sweep` does.
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
        yield _Remote(step, gpu, release, run_setting, executor).run_all
        return
    runner = _Growing(step, gpu, release, run_setting, expected)
    try:
        yield runner.run_all
    finally:
        runner.close()


class _Remote:
    """Runs settings on an executor that somebody gave."""

    def __init__(self, step: Step, gpu: str, release: str | None, run_setting: RunSetting, executor: Executor) -> None:
        self._payload = workers.packed(step)
        self._rest = (gpu, run_setting, workers.surroundings(release), workers.here())
        self._executor = executor

    def submit(self, knobs: Knobs) -> Future[bytes]:
        asked = cloudpickle.dumps((knobs, *self._rest))
        return self._executor.submit(workers.answer, self._payload, asked)

    def run_all(self, settings: Iterable[Knobs]) -> Iterator[Result]:
        waiting = deque(settings)
        at_work: dict[Future[bytes], Knobs] = {}
        try:
            while waiting or at_work:
                while waiting and len(at_work) < _WINDOW:
                    knobs = waiting.popleft()
                    try:
                        at_work[self.submit(knobs)] = knobs
                    except BrokenExecutor as error:
                        yield Failed(knobs, error)
                done, _ = concurrent.futures.wait(at_work, return_when=concurrent.futures.FIRST_COMPLETED)
                for future in [one for one in at_work if one in done]:
                    yield _received(future, at_work.pop(future))
        finally:
            for future in at_work:
                future.cancel()


def _received(future: Future[bytes], knobs: Knobs) -> Result:
    error = future.exception()
    if error is not None:
        return Failed(knobs, error)
    result: Result | TypeError = pickle.loads(future.result())
    if isinstance(result, TypeError):
        raise result
    return result


class _Growing:
    """Runs settings in this process, and in processes of its own once these are worth their start.

    A worker that dies takes the pool with it. The settings that were at work then are run one by one in pools of
    their own, so the one that kills its worker is told from those that were beside it.
    """

    def __init__(self, step: Step, gpu: str, release: str | None, run_setting: RunSetting, expected: int) -> None:
        self._step, self._gpu, self._release, self._run_setting = step, gpu, release, run_setting
        self._expected = expected
        # Weights do not travel, and a second process on a real GPU would take memory from the first.
        self._count = 1 if targets.is_real(gpu) else workers.processors()
        self._seconds: list[float] = []
        self._sendable = True
        self._pool: Any = None
        self._remote: _Remote | None = None

    def close(self) -> None:
        """End the processes."""
        if self._pool is not None:
            workers.ended(self._pool)
            self._pool = self._remote = None

    def run_all(self, settings: Iterable[Knobs]) -> Iterator[Result]:
        waiting = deque(settings)
        self._expected = max(self._expected, len(waiting))
        while waiting and not self._worth_processes():
            yield self._here(waiting.popleft())
        while waiting:
            yield from self._in_processes(waiting)

    def _worth_processes(self) -> bool:
        if self._remote is not None:
            return True
        if len(self._seconds) < 2 or self._count < 2 or not self._sendable:
            return False
        # The first run works out plans that later ones only look up.
        ahead = (self._expected - len(self._seconds)) * self._seconds[-1]
        if ahead * (1 - 1 / self._count) <= _START:
            return False
        try:
            self._start(self._count)
        except TypeError:
            # What cannot be sent runs here: it takes longer and is no other answer.
            self._sendable = False
        return self._sendable

    def _start(self, count: int) -> None:
        self.close()
        self._pool = workers.spawned(count)
        self._remote = _Remote(self._step, self._gpu, self._release, self._run_setting, self._pool)

    def _here(self, knobs: Knobs) -> Result:
        start = time.monotonic()
        try:
            return Done(*self._run_setting(self._step, knobs, gpu=self._gpu, release=self._release))
        except Exception as error:
            return Failed(knobs, workers.bare(error))
        finally:
            self._seconds.append(time.monotonic() - start)

    def _in_processes(self, waiting: deque[Knobs]) -> Iterator[Result]:
        """Run settings until none waits or a worker has died."""
        assert self._remote is not None
        at_work: dict[Future[bytes], Knobs] = {}
        suspects: list[Knobs] = []
        while (waiting or at_work) and not suspects:
            while waiting and len(at_work) < self._count + 1:
                try:
                    future = self._remote.submit(waiting[0])
                except BrokenExecutor:
                    suspects.append(waiting.popleft())
                    break
                at_work[future] = waiting.popleft()
            done, _ = concurrent.futures.wait(at_work, return_when=concurrent.futures.FIRST_COMPLETED)
            for future in [one for one in at_work if one in done]:
                knobs = at_work.pop(future)
                if isinstance(future.exception(), BrokenExecutor):
                    suspects.append(knobs)
                else:
                    yield _received(future, knobs)
        if not suspects:
            return
        suspects += at_work.values()
        for knobs in suspects:
            self._start(1)
            future = self._remote.submit(knobs)
            result = _received(future, knobs)
            if isinstance(result, Failed) and isinstance(result.error, BrokenExecutor):
                result = Failed(knobs, RuntimeError(f"the process that ran {knobs} died"))
            yield result
        self._start(self._count)
