"""Run many settings of one step: `sweep`."""

from __future__ import annotations

import contextlib
import dataclasses
import time
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import Executor
from typing import TYPE_CHECKING, Any

from memexplore.analysis.tradeoffs import Point
from memexplore.run.knobs.applying.layer_names import check_names
from memexplore.run.knobs.knobs import KNOBS, Knobs, layers_of
from memexplore.run.machine import Machine, machine_of
from memexplore.run.programs.outcome import Outcome, extra_flops, point, slow_down
from memexplore.run.programs.step import Step
from memexplore.run.programs.step_record import built_model
from memexplore.run.run import Run, Want
from memexplore.run.search.progress import Reporting, progress_of, report_of
from memexplore.run.search.results import Done, Failed, Result, error_text
from memexplore.run.search.results_table import Line, html_table, sent_cells, sent_columns, text_table
from memexplore.run.search.runners import runner_of
from memexplore.tape import Os, Tape

if TYPE_CHECKING:
    import pandas


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class Sweep(Mapping[Knobs, Tape]):
    """The Tape of every setting that ran, in the order of the settings; `print` shows a table."""

    runs: dict[Knobs, Run]
    errors: dict[Knobs, BaseException]
    """Errors of the other settings; the traceback is in the notes of each."""
    outcomes: dict[Knobs, Outcome]
    """Memory and cost of each setting."""
    as_written: Outcome | None
    """The outcome of the step as written, for comparison; None if it raises an error."""
    cancelled: bool
    """Whether the sweep was interrupted: settings that had not run are then neither in `runs` nor in `errors`."""

    def __getitem__(self, knobs: Knobs) -> Tape:
        if knobs in self.errors:
            raise KeyError(f"{knobs} failed: {error_text(self.errors[knobs])}")
        return self.runs[knobs].tape

    def __iter__(self) -> Iterator[Knobs]:
        return iter(self.runs)

    def __len__(self) -> int:
        return len(self.runs)

    @property
    def points(self) -> tuple[Point, ...]:
        """The settings as points of the trade-off chart."""
        return tuple(point(outcome, self.as_written) for outcome in self.outcomes.values())

    def to_pandas(self) -> pandas.DataFrame:
        """Return one row per setting, indexed by its knobs as text; sizes in bytes.

        First the knobs that differ between the settings, as text; then `outcome` ("fits", "oom" or "failed"), `gpu`,
        `peak_allocated`, `peak_reserved`, `needed` (the smallest capacity with which the setting runs) and `margin`
        (bytes left of the GPU, negative where bytes are missing),
        `flops` of one step, `extra_flops` (share beyond the step as written) and `slow_down` (time over the time as
        written, expected or measured), both per sample, `source` ("predicted" or "measured") and `error`. Where a
        setting has several GPUs, also `sent` (bytes that one GPU sends in a step) and `link_seconds` (their time).
        """
        import pandas

        settings = [*self.runs, *self.errors]
        # The GPU has a column of its own.
        names = [name for name in KNOBS if name != "gpu"]
        differing = [name for name in names if len({getattr(knobs, name) for knobs in settings}) > 1]
        rows = []
        for knobs in settings:
            row: dict[str, Any] = {"setting": str(knobs)}
            row |= {name: KNOBS[name].values.text(getattr(knobs, name)) for name in differing}
            outcome = self.outcomes.get(knobs)
            if outcome is None:
                rows.append(row | {"outcome": "failed", "error": error_text(self.errors[knobs])})
                continue
            row |= {"outcome": "fits" if outcome.fits else "oom", "gpu": outcome.gpu}
            row |= {"peak_allocated": outcome.peak_allocated, "peak_reserved": outcome.peak_reserved}
            row |= {"needed": outcome.needed, "margin": outcome.margin, "flops": outcome.flops}
            row |= {"extra_flops": extra_flops(outcome, self.as_written)}
            row |= {"sent": outcome.sent, "link_seconds": outcome.link_seconds}
            row |= {"slow_down": slow_down(outcome, self.as_written), "source": str(outcome.source), "error": ""}
            rows.append(row)
        sizes = ["peak_allocated", "peak_reserved", "needed", "margin", "flops"]
        columns = ["setting", *differing, "outcome", "gpu", *sizes]
        sent = ["sent", "link_seconds"] if self._more else []
        table = pandas.DataFrame(rows, columns=[*columns, "extra_flops", "slow_down", *sent, "source", "error"])
        return table.astype(dict.fromkeys([*sizes, *sent[:1]], "Int64")).set_index("setting")

    def __repr__(self) -> str:
        return f"<{self._title()}>"

    def __str__(self) -> str:
        return f"{self._title()}\n{text_table(self._lines(), self._more)}"

    def _repr_html_(self) -> str:
        return html_table([self._title()], self._lines(), self._more)

    @property
    def _more(self) -> tuple[str, ...]:
        return sent_columns(self.outcomes.values())

    def _title(self) -> str:
        fitting = sum(outcome.fits for outcome in self.outcomes.values())
        parts = [f"{fitting} fit", f"{len(self.outcomes) - fitting} out of memory"]
        parts += [f"{len(self.errors)} failed"] if self.errors else []
        parts += ["cancelled"] if self.cancelled else []
        return f"Sweep of {len(self.runs) + len(self.errors)} settings: {', '.join(parts)}"

    def _lines(self) -> list[Line]:
        lines = [
            Line(
                str(knobs),
                outcome,
                slow_down(outcome, self.as_written),
                extra_flops(outcome, self.as_written),
                sent_cells(outcome, self._more),
                tape=self.runs[knobs].tape,
            )
            for knobs, outcome in self.outcomes.items()
        ]
        return [*lines, *(Line(str(knobs), None, error=error_text(error)) for knobs, error in self.errors.items())]


def sweep(
    step: Step,
    settings: Iterable[Knobs],
    *,
    gpu: str | None = None,
    release: str | None = None,
    os: str = Os.LINUX,
    executor: Executor | None = None,
    progress: Reporting = "shown",
) -> Sweep:
    """Run a step with each of some settings, and as written for comparison.

    `gpu` is a name of the catalogue or a size, which mean a virtual GPU, or ``cuda`` or ``cpu`` for a real device, on
    which one setting runs after another in this process. Default: the real GPU if usable, else a virtual T4.
    `release` and `os` are as in `virtual`.

    `executor` is any `concurrent.futures.Executor` whose workers are processes, here or on other machines. Without one,
    settings run in this process, and in one new process per processor as soon as that saves time: after two runs, where
    at least two are left and take longer than the start of a process (a few seconds). Equal settings are run once.
    `progress` is a function that is called after every setting; None is silent. An interrupt (Ctrl-C, or the notebook's
    stop button) ends the sweep, which then holds the settings that have run.

    >>> import torch
    >>> step = Step(torch.nn.Linear(1024, 1024), torch.zeros(4, 1024), loss=torch.mean)
    >>> done = sweep(step, [Knobs(batch=4), Knobs(batch=3, accumulation=2)], progress=None)
    >>> len(done), [str(error) for error in done.errors.values()]
    (1, ['accumulation=2 does not divide batch=3; write one of its divisors'])

    Raises TypeError for an executor of threads (the virtual GPU is process-wide) and, with an executor, for a step that
    cannot be pickled; before any run, TypeError for a setting that is not `Knobs`, ValueError for a layer that the
    model does not have. The error of a setting that fails is in its row of the table.
    """
    wanted, machine = _checked(step, settings), machine_of(gpu, release=release, os=os)
    every = list(dict.fromkeys([Knobs(), *wanted]))
    results: dict[Knobs, Result] = {}
    finished: list[float] = []
    report = report_of(progress)
    cancelled, start = False, time.monotonic()
    try:
        for result in stream(step, every, machine, executor):
            results[result.knobs] = result
            finished.append(time.monotonic() - start)
            if report is not None:
                failed = sum(isinstance(result, Failed) for result in results.values())
                report(progress_of(finished, failed, len(every)))
    except KeyboardInterrupt:
        cancelled = True
    done = {knobs: one for knobs in wanted if isinstance(one := results.get(knobs), Done)}
    failures = {knobs: one for knobs in wanted if isinstance(one := results.get(knobs), Failed)}
    as_written = results.get(Knobs())
    return Sweep(
        runs={knobs: one.run for knobs, one in done.items()},
        errors={knobs: one.error for knobs, one in failures.items()},
        outcomes={knobs: one.run.outcome for knobs, one in done.items()},
        as_written=as_written.run.outcome if isinstance(as_written, Done) else None,
        cancelled=cancelled,
    )


def _checked(step: Step, settings: Iterable[Knobs]) -> list[Knobs]:
    """Return the settings, each once; raise TypeError or ValueError for one that no run could follow."""
    given = list(settings) if isinstance(settings, Iterable) else [settings]
    for one in given:
        if not isinstance(one, Knobs) or not isinstance(settings, Iterable):
            found = "Knobs" if isinstance(one, Knobs) else repr(one)
            raise TypeError(f"the settings of a sweep are a list of Knobs, not {found}; write [Knobs(batch=4), ...]")
    for knobs in given:
        if names := layers_of(knobs):
            check_names(built_model(step), names)
    return list(dict.fromkeys(given))


def stream(
    step: Step, settings: Iterable[Knobs], machine: Machine, executor: Executor | None = None
) -> Iterator[Result]:
    """Yield the results of settings in the order in which they end; closing the generator cancels waiting settings.

    Raises as `sweep` does.
    """
    settings = list(settings)
    with contextlib.closing(runner_of(step, machine, executor, Want.TAPE, len(settings))) as runner:
        runner.submit(settings)
        for _ in settings:
            yield runner.next_result()
