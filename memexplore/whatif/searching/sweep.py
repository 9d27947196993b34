"""Many settings of one step, each run: here, or in other processes."""

from __future__ import annotations

import concurrent.futures
import contextlib
import dataclasses
import enum
import math
import pickle
import sys
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import BrokenExecutor, Executor, Future, ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, NamedTuple

import cloudpickle

from memexplore import devices
from memexplore.tape import Tape
from memexplore.tradeoffs import Point
from memexplore.units import size_text
from memexplore.whatif.knobs import Knobs
from memexplore.whatif.searching import workers
from memexplore.whatif.searching.measured import Measured, extra_flops, measure, point, slow_down
from memexplore.whatif.searching.workers import Done, Failed, Result
from memexplore.whatif.step import Step
from memexplore.whatif.trial import Trial

if TYPE_CHECKING:
    import pandas

_START = 8.0
"""Seconds that spawned processes need until each has imported torch and run its first setting."""
_WINDOW = 64
"""Settings handed to an executor at once: enough to keep many workers busy, few to be cancelled."""


class Progress(NamedTuple):
    """How far a sweep is; `seconds` since it began, `left` an estimate of those to come, None while there is none."""

    done: int
    failed: int
    total: int
    seconds: float
    left: float | None


def left(finished: list[float], total: int) -> float | None:
    """Seconds left of a sweep, from the times at which its settings were finished so far; None before the second.

    The first setting counts for nothing: it includes the start of the processes.

    >>> left([5.0, 6.0, 7.0], total=10)  # one a second, seven to come
    7.0
    """
    if len(finished) >= total:
        return 0.0
    if len(finished) < 2:
        return None
    return (finished[-1] - finished[0]) / (len(finished) - 1) * (total - len(finished))


def print_progress(progress: Progress) -> None:
    """Write the progress onto one line of standard error, in a terminal and in a notebook; elsewhere only its end."""
    stream = sys.stderr
    ended = progress.done == progress.total
    redraws = stream.isatty() or "ipykernel" in type(stream).__module__
    if not (redraws or ended):
        return
    words = f"{progress.done} of {progress.total} settings run"
    words += f", {progress.failed} failed" if progress.failed else ""
    words += f" in {progress.seconds:.0f} s" if ended else ""
    words += f", about {progress.left:.0f} s left" if progress.left else ""
    stream.write(("\r" if redraws else "") + words.ljust(70 if redraws else 0) + ("\n" if ended else ""))
    stream.flush()


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class Sweep(Mapping[Knobs, Tape]):
    """The Tape of every setting that could be run, in the order asked."""

    trials: dict[Knobs, Trial]
    errors: dict[Knobs, BaseException]
    """What the other settings raised; where it came from is in the error's notes."""
    measured: dict[Knobs, Measured]
    """What each setting needs and costs."""
    as_written: Measured | None
    """What the others are compared with; None where the step as written fails."""
    cancelled: bool
    """Whether it was interrupted: then some settings that were asked for are neither in `trials` nor in `errors`."""

    def __getitem__(self, knobs: Knobs) -> Tape:
        if knobs in self.errors:
            raise KeyError(f"{knobs} failed: {self.errors[knobs]}")
        return self.trials[knobs].tape

    def __iter__(self) -> Iterator[Knobs]:
        return iter(self.trials)

    def __len__(self) -> int:
        return len(self.trials)

    @property
    def points(self) -> tuple[Point, ...]:
        """The settings in the trade-off chart."""
        return tuple(point(measured, self.as_written) for measured in self.measured.values())

    def to_pandas(self) -> pandas.DataFrame:
        """One row a setting, indexed by its knobs in words; sizes in bytes.

        First the knobs that differ between the settings, as text; then `outcome` ("fits", "oom" or "failed"), `gpu`,
        `peak_allocated`, `peak_reserved` and `margin` (what the setting needs, and what is left of the GPU: negative
        where it does not fit), `flops` of one step, `extra_flops` (share beyond the step as written) and `slow_down`
        (expected time over that as written), both for a sample, and `error`.
        """
        import pandas

        asked = [*self.trials, *self.errors]
        # The GPU has a column of its own.
        names = [field.name for field in dataclasses.fields(Knobs) if field.name != "gpu"]
        differing = [name for name in names if len({getattr(knobs, name) for knobs in asked}) > 1]
        rows = []
        for knobs in asked:
            row: dict[str, Any] = {"setting": str(knobs)}
            row |= {name: _words(getattr(knobs, name)) for name in differing}
            measured = self.measured.get(knobs)
            if measured is None:
                rows.append(row | {"outcome": "failed", "error": str(self.errors[knobs])})
                continue
            row |= {"outcome": "fits" if measured.fits else "oom", "gpu": measured.gpu}
            row |= {"peak_allocated": measured.peak_allocated, "peak_reserved": measured.peak_reserved}
            row |= {"margin": measured.margin, "flops": measured.flops}
            row |= {"extra_flops": extra_flops(measured, self.as_written)}
            row |= {"slow_down": slow_down(measured, self.as_written), "error": ""}
            rows.append(row)
        columns = ["setting", *differing, "outcome", "gpu", "peak_allocated", "peak_reserved", "margin", "flops"]
        table = pandas.DataFrame(rows, columns=[*columns, "extra_flops", "slow_down", "error"])
        sizes = ["peak_allocated", "peak_reserved", "margin", "flops"]
        return table.astype(dict.fromkeys(sizes, "Int64")).set_index("setting")

    def __repr__(self) -> str:
        count = sum(measured.fits for measured in self.measured.values())
        parts = [f"{count} fit", f"{len(self.measured) - count} do not"]
        parts += [f"{len(self.errors)} failed"] if self.errors else []
        parts += ["cancelled"] if self.cancelled else []
        lines = [f"Sweep of {len(self.trials) + len(self.errors)} settings: {', '.join(parts)}"]
        for knobs, measured in self.measured.items():
            room = f"{size_text(abs(measured.margin))} {'to spare' if measured.fits else 'too much'}"
            pace = slow_down(measured, self.as_written)
            words = f"{pace:.2f}x the time" if not math.isnan(pace) else "time unknown"
            lines.append(f"  {knobs}: {size_text(measured.peak_reserved)} reserved, {room}, {words}")
        lines += [f"  {knobs}: failed, {error}" for knobs, error in self.errors.items()]
        return "\n".join(lines)


def sweep(
    step: Step,
    settings: Iterable[Knobs],
    *,
    gpu: str = "T4",
    release: str | None = None,
    executor: Executor | None = None,
    progress: Callable[[Progress], object] | None = print_progress,
) -> Sweep:
    """Run a step with each of many settings, and as written beside them to compare with.

    `executor` is any `concurrent.futures.Executor` whose workers are processes, here or on other machines. Without one,
    settings run in this process for as long as that is quicker than starting others (a few seconds), and then in one
    fresh process a processor. Equal settings are run once. `progress` is called after every setting; None is silent.
    An interrupt (Ctrl-C, or the notebook's stop button) ends the sweep: what is done by then is in the answer.

    >>> import torch
    >>> step = Step(torch.nn.Linear(1024, 1024), torch.zeros(4, 1024), loss=torch.mean)
    >>> found = sweep(step, [Knobs(batch=4), Knobs(batch=3, accumulation=2)], progress=None)
    >>> len(found), [str(error) for error in found.errors.values()]
    (1, ['accumulation=2 does not divide batch=3; write one of its divisors'])

    Raises TypeError for an executor of threads (the virtual GPU is process-wide) and for a step that cannot be sent.
    """
    asked = list(dict.fromkeys(settings))
    wanted = list(dict.fromkeys([Knobs(), *asked]))
    results: dict[Knobs, Result] = {}
    finished: list[float] = []
    cancelled, start = False, time.monotonic()
    try:
        for result in stream(step, wanted, gpu=gpu, release=release, executor=executor):
            results[_knobs(result)] = result
            finished.append(time.monotonic() - start)
            if progress is not None:
                failed = sum(isinstance(result, Failed) for result in results.values())
                progress(
                    Progress(len(results), failed, len(wanted), finished[-1], left(finished, len(wanted))),
                )
    except KeyboardInterrupt:
        cancelled = True
    done = {knobs: one for knobs in asked if isinstance(one := results.get(knobs), Done)}
    broken = {knobs: one for knobs in asked if isinstance(one := results.get(knobs), Failed)}
    base = results.get(Knobs())
    return Sweep(
        trials={knobs: one.trial for knobs, one in done.items()},
        errors={knobs: one.error for knobs, one in broken.items()},
        measured={knobs: one.measured for knobs, one in done.items()},
        as_written=base.measured if isinstance(base, Done) else None,
        cancelled=cancelled,
    )


def stream(
    step: Step,
    settings: Iterable[Knobs],
    *,
    gpu: str = "T4",
    release: str | None = None,
    executor: Executor | None = None,
) -> Iterator[Result]:
    """The settings' results one by one, in the order in which they come; closing it cancels those that wait.

    Raises as `sweep` does.
    """
    settings = list(settings)
    with running(step, gpu=gpu, release=release, executor=executor, expected=len(settings)) as run_all:
        yield from run_all(settings)


RunAll = Callable[[Iterable[Knobs]], Iterator[Result]]


@contextlib.contextmanager
def running(step: Step, *, gpu: str, release: str | None, executor: Executor | None, expected: int) -> Iterator[RunAll]:
    """A function that runs some settings, again and again with the same workers; `expected` is how many in all.

    Raises as `sweep` does.
    """
    devices.find(gpu)
    if isinstance(executor, ThreadPoolExecutor):
        raise TypeError(
            "a sweep cannot run in threads, as the virtual GPU is process-wide: leave executor out, or give one with "
            "processes of its own such as concurrent.futures.ProcessPoolExecutor"
        )
    if executor is not None:
        yield _Remote(step, gpu, release, executor).run_all
        return
    runner = _Growing(step, gpu, release, expected)
    try:
        yield runner.run_all
    finally:
        runner.close()


class _Remote:
    """Runs settings on an executor that somebody gave."""

    def __init__(self, step: Step, gpu: str, release: str | None, executor: Executor) -> None:
        self._payload = workers.packed(step)
        self._rest = (gpu, workers.surroundings(release), workers.here())
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

    def __init__(self, step: Step, gpu: str, release: str | None, expected: int) -> None:
        self._step, self._gpu, self._release = step, gpu, release
        self._expected = expected
        self._count = workers.processors()
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
        self._remote = _Remote(self._step, self._gpu, self._release, self._pool)

    def _here(self, knobs: Knobs) -> Result:
        start = time.monotonic()
        try:
            return Done(*measure(self._step, knobs, gpu=self._gpu, release=self._release))
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


def _knobs(result: Result) -> Knobs:
    return result.trial.knobs if isinstance(result, Done) else result.knobs


def _words(value: Any) -> str:
    if value is None:
        return "as written"
    if isinstance(value, tuple):
        return " ".join(map(str, value)) or "as written"
    return str(value.value if isinstance(value, enum.Enum) else value)
