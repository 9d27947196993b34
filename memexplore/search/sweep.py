"""Many settings of one step, each run: here, or in other processes."""

from __future__ import annotations

import dataclasses
import enum
import math
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Executor
from typing import TYPE_CHECKING, Any, NamedTuple

from memexplore import targets
from memexplore.analysis.tradeoffs import Point
from memexplore.knobs.knobs import Knobs
from memexplore.search.executors import running
from memexplore.search.workers import Done, Failed, Result
from memexplore.steps.outcome import Outcome, extra_flops, point, slow_down
from memexplore.steps.step import Step
from memexplore.steps.trial import Trial
from memexplore.tape import Tape
from memexplore.units import size_text

if TYPE_CHECKING:
    import pandas


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
    outcomes: dict[Knobs, Outcome]
    """What each setting needs and costs."""
    as_written: Outcome | None
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
        return tuple(point(outcome, self.as_written) for outcome in self.outcomes.values())

    def to_pandas(self) -> pandas.DataFrame:
        """One row a setting, indexed by its knobs in words; sizes in bytes.

        First the knobs that differ between the settings, as text; then `outcome` ("fits", "oom" or "failed"), `gpu`,
        `peak_allocated`, `peak_reserved` and `margin` (what the setting needs, and what is left of the GPU: negative
        where it does not fit), `flops` of one step, `extra_flops` (share beyond the step as written) and `slow_down`
        (time over that as written, expected or measured), both for a sample, `source` ("predicted" or "measured") and
        `error`.
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
            outcome = self.outcomes.get(knobs)
            if outcome is None:
                rows.append(row | {"outcome": "failed", "error": str(self.errors[knobs])})
                continue
            row |= {"outcome": "fits" if outcome.fits else "oom", "gpu": outcome.gpu}
            row |= {"peak_allocated": outcome.peak_allocated, "peak_reserved": outcome.peak_reserved}
            row |= {"margin": outcome.margin, "flops": outcome.flops}
            row |= {"extra_flops": extra_flops(outcome, self.as_written)}
            row |= {"slow_down": slow_down(outcome, self.as_written), "source": str(outcome.source), "error": ""}
            rows.append(row)
        columns = ["setting", *differing, "outcome", "gpu", "peak_allocated", "peak_reserved", "margin", "flops"]
        table = pandas.DataFrame(rows, columns=[*columns, "extra_flops", "slow_down", "source", "error"])
        sizes = ["peak_allocated", "peak_reserved", "margin", "flops"]
        return table.astype(dict.fromkeys(sizes, "Int64")).set_index("setting")

    def __repr__(self) -> str:
        count = sum(outcome.fits for outcome in self.outcomes.values())
        parts = [f"{count} fit", f"{len(self.outcomes) - count} do not"]
        parts += [f"{len(self.errors)} failed"] if self.errors else []
        parts += ["cancelled"] if self.cancelled else []
        lines = [f"Sweep of {len(self.trials) + len(self.errors)} settings: {', '.join(parts)}"]
        for knobs, outcome in self.outcomes.items():
            room = f"{size_text(abs(outcome.margin))} {'to spare' if outcome.fits else 'too much'}"
            pace = slow_down(outcome, self.as_written)
            words = f"{pace:.2f}x the time" if not math.isnan(pace) else "time unknown"
            lines.append(f"  {knobs}: {size_text(outcome.peak_reserved)} reserved, {room}, {words}")
        lines += [f"  {knobs}: failed, {error}" for knobs, error in self.errors.items()]
        return "\n".join(lines)


def sweep(
    step: Step,
    settings: Iterable[Knobs],
    *,
    gpu: str | None = None,
    release: str | None = None,
    executor: Executor | None = None,
    progress: Callable[[Progress], object] | None = print_progress,
) -> Sweep:
    """Run a step with each of many settings, and as written beside them to compare with.

    `gpu` is a name of the catalogue or a size, which mean a virtual GPU, or ``cuda`` or ``cpu`` for a real device, on
    which one setting runs after another in this process. Default: the real GPU if usable, else a virtual T4.

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
        outcomes={knobs: one.outcome for knobs, one in done.items()},
        as_written=base.outcome if isinstance(base, Done) else None,
        cancelled=cancelled,
    )


def stream(
    step: Step,
    settings: Iterable[Knobs],
    *,
    gpu: str | None = None,
    release: str | None = None,
    executor: Executor | None = None,
) -> Iterator[Result]:
    """The settings' results one by one, in the order in which they come; closing it cancels those that wait.

    Raises as `sweep` does.
    """
    settings = list(settings)
    with running(
        step, gpu=gpu or targets.default_target(), release=release, executor=executor, expected=len(settings)
    ) as run_all:
        yield from run_all(settings)


def _knobs(result: Result) -> Knobs:
    return result.trial.knobs if isinstance(result, Done) else result.knobs


def _words(value: Any) -> str:
    if value is None:
        return "as written"
    if isinstance(value, tuple):
        return " ".join(map(str, value)) or "as written"
    return str(value.value if isinstance(value, enum.Enum) else value)
