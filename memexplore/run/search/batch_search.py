"""The largest batch of a setting.

In: a `RunLog` and a setting that it has run with the batch of the step. Out: a search (`run_log.Runs`), whose answer is
a `LargestBatch`; the searches of several settings run beside each other, so that processes share the runs.
"""

from __future__ import annotations

import functools
from collections.abc import Generator

from memexplore.analysis.tradeoffs import frontier
from memexplore.run.knobs.knobs import Knobs
from memexplore.run.search import candidates
from memexplore.run.search.batch_extrapolation import extrapolated_batch, proportional_batch
from memexplore.run.search.candidates import BatchResult, LargestBatch
from memexplore.run.search.results import error_text
from memexplore.run.search.run_log import RunLog

_MAX_SMALLER = 4
"""Settings that do not fit and are tried with a smaller batch, at most."""
_RUNS_PER_SEARCH = 4
"""Runs of one search, about: for the estimate of the time left."""
_MANY_MICRO_BATCHES = 16
"""From this many micro-batches on, the batch is first searched without them, as each run then takes less time."""

BatchSearch = Generator[int, BatchResult, LargestBatch]


def expect_searches(log: RunLog, count: int, other_runs: int | None = None) -> None:
    """Set the expected runs of the log: `count` batch searches after `other_runs` in all (None: the runs so far)."""
    log.expected_runs = (log.run_count if other_runs is None else other_runs) + _RUNS_PER_SEARCH * count


def settings_for_smaller_batch(log: RunLog) -> list[Knobs]:
    """Return settings that may fit with a smaller batch: as written, then those that train the same, then others."""
    if log.has_acceptable_option():
        return [Knobs()]
    points, capacity = log.points(), log.gpu.capacity
    # A smaller batch makes micro-batches needless, and cannot help where weights and gradients alone are too large.
    eligible = [
        knobs
        for knobs, point in points.items()
        if not point.fits and not knobs.accumulation and point.constant < capacity
    ]
    best = [eligible[number] for number in frontier([(points[knobs].time, points[knobs].needed) for knobs in eligible])]
    best.sort(key=lambda knobs: (len(candidates.altered(knobs, log.model)), points[knobs].time))
    return list(dict.fromkeys([Knobs(), *best[:_MAX_SMALLER]]))


def largest_batch_of(log: RunLog, knobs: Knobs) -> Generator[list[Knobs], None, LargestBatch]:
    """Search (`RunLog.run_beside`) until the largest batch that fits a setting and the next larger one are run."""
    estimate = None
    if (knobs.accumulation or 1) >= _MANY_MICRO_BATCHES:
        whole = knobs.replace(accumulation=None)
        estimate = (knobs.accumulation or 1) * (yield from _runs(log, whole, _search(log, whole))).samples
    return (yield from _runs(log, knobs, _search(log, knobs, estimate)))


def _search(log: RunLog, knobs: Knobs, estimate: int | None = None) -> BatchSearch:
    unit = knobs.accumulation or 1
    outcome = log.outcomes.get(knobs)
    if outcome is None:
        # The size of a micro-batch that fits is the best estimate of a batch that fits without micro-batches.
        cut = [one for one in log.outcomes if one.replace(accumulation=None, batch=None) == knobs and one.accumulation]
        count = max((one.accumulation or 1 for one in cut), default=1)
        return candidates.largest_batch(max(1, log.samples // count), log.gpu.capacity)
    return candidates.largest_batch(
        log.samples,
        outcome.capacity,
        unit=unit,
        constant=outcome.constant,
        estimate=estimate or _filling_batch(log, knobs) or None,
    )


def _filling_batch(log: RunLog, knobs: Knobs) -> int | None:
    """The batch that fills the GPU if only tensors of the batch grow, by the run of a setting; None if unknown."""
    outcome = log.outcomes[knobs]
    return proportional_batch(log.tapes[knobs], log.samples, outcome.capacity, knobs.accumulation or 1)


def _runs(log: RunLog, knobs: Knobs, search: BatchSearch) -> Generator[list[Knobs], None, LargestBatch]:
    """Yield a setting with each batch of a search in turn, and return the answer of the search."""
    run_before: dict[int, Knobs] = {}
    batch = next(search)
    while True:
        setting = knobs if batch == log.samples and knobs in log.outcomes else knobs.replace(batch=batch)
        yield [setting]
        one = log.outcomes.get(setting)
        run_before[batch] = setting
        # A batch that cannot be run, such as one too large for an index, does not fit.
        result = (
            BatchResult(one.fits, one.needed, functools.partial(_extrapolated, log, run_before))
            if one
            else BatchResult(False, None)
        )
        try:
            batch = search.send(result)
        except StopIteration as end:
            return _known(log, run_before, end.value)


def _known(log: RunLog, run_before: dict[int, Knobs], found: LargestBatch) -> LargestBatch:
    """Return the answer of a search with its error, if every batch but that of the step has failed."""
    others = [setting for batch, setting in run_before.items() if batch != log.samples]
    if not others or any(setting in log.outcomes for setting in others):
        return found
    return found._replace(proven=False, error=error_text(log.errors[others[0]]))


def _extrapolated(log: RunLog, settings: dict[int, Knobs]) -> int | None:
    """The extrapolation from the latest two batches; None where one of them was not run."""
    latest = dict(list(settings.items())[-2:])
    if len(latest) != 2 or not all(knobs in log.tapes for knobs in latest.values()):
        return None
    *_, knobs = latest.values()
    tapes = {batch: log.tapes[setting] for batch, setting in latest.items()}
    return extrapolated_batch(tapes, log.outcomes[knobs].capacity, knobs.accumulation or 1)
