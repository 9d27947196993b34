"""Combinations of knobs to run next. Nothing is run here.

In: candidates and the `SearchPoint`s of the settings that were run. Out: the settings to run next, best estimate first.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple

from memexplore.analysis.tradeoffs import frontier
from memexplore.run.knobs.knob import Untouched
from memexplore.run.knobs.knobs import KNOBS, Knobs, conflicts
from memexplore.run.search.candidates import Candidate
from memexplore.run.search.estimates import SearchPoint, cannot_fit, combined


def worth_combining(candidates: Iterable[Candidate], points: Mapping[Knobs, SearchPoint]) -> tuple[Candidate, ...]:
    """Return the candidates that save time or memory and that no other value of the same knob beats in both.

    Knobs of activations are compared by these: saving them helps beside a knob that saves what weights need.
    """
    written = points[Knobs()]

    def least(one: Candidate) -> int:
        point = points[one.knobs]
        if KNOBS[one.field].untouched(getattr(one.knobs, one.field)) is not Untouched.ALL_BUT_ACTIVATIONS:
            return point.needed
        return min(point.needed, point.constant - point.gradients + point.activations)

    better = [
        one
        for one in candidates
        if one.knobs in points
        and (
            points[one.knobs].needed < written.needed
            or points[one.knobs].time < written.time * 0.99
            or points[one.knobs].activations < written.activations * 0.98
        )
    ]
    kept: set[Knobs] = set()
    for field, alters in dict.fromkeys((one.field, one.alters) for one in better):
        rivals = [one for one in better if (one.field, one.alters) == (field, alters)]
        best = frontier([(points[one.knobs].time, least(one)) for one in rivals])
        kept |= {rivals[number].knobs for number in best}
    return tuple(one for one in better if one.knobs in kept)


ACCEPTABLE_SLOW_DOWN = 1.5
"""Time over the time as written up to which a setting that trains the same ends the search for other trainings."""
_AS_FAST = 1.01
"""A setting is as fast as another if it takes at most this share of its time."""


def next_combinations(
    candidates: Iterable[Candidate],
    points: Mapping[Knobs, SearchPoint],
    failed: Iterable[Knobs],
    capacity: int,
    count: int,
    estimates: Mapping[Knobs, SearchPoint] | None = None,
) -> list[Knobs]:
    """Return the next `count` settings to run: settings that were run with one more knob changed, best estimate first.

    Time and bytes are estimated by the ratios of the single knobs (`estimates.combined`); `estimates` has the points of
    those that were not run. Settings expected to fit come first, and of these what trains the same; fields that change
    the training take turns. The estimate only orders the runs. Excluded are:

    - knobs that do not make a fitting setting faster: any other would cost something and gain nothing;
    - more knobs than a setting that fits and is as fast, and settings that one that fits is expected to beat;
    - settings whose weights, gradients, optimizer state and update exceed the capacity whatever the new knob saves;
    - settings that change more of the training than one that fits within `ACCEPTABLE_SLOW_DOWN`;
    - more micro-batches than fit, or are expected to.
    """
    search = _Search(tuple(candidates), points, failed, capacity)
    merits: dict[Knobs, _Merit] = {}
    for both, estimate in search.combinations({**(estimates or {}), **points}):
        merit = search.merit(both, estimate)
        merits[both] = min(merit, merits.get(both, merit))
    ordered = sorted(merits, key=lambda knobs: merits[knobs])
    by_count: dict[Knobs, list[Knobs]] = {}
    for knobs in ordered:
        by_count.setdefault(knobs.replace(accumulation=None), []).append(knobs)
    chosen = {
        _micro_batched(rivals, [knobs for knobs in rivals if not merits[knobs].is_expected_too_large])
        for rivals in by_count.values()
    }
    return search.in_turns({knobs: merits[knobs] for knobs in ordered if knobs in chosen})[:count]


class _Merit(NamedTuple):
    """Orders combinations, best first."""

    cannot_save_enough: bool
    """Whether weights, gradients and optimizer state alone are too large, so that saving activations cannot help."""
    is_expected_too_large: bool
    altered: int
    """Number of fields that change the training."""
    cost: float
    """Time of what is expected to fit, else bytes."""
    changes: int
    text: str


class _Search:
    """The candidates and the settings that were run, and what these say of a combination that was not."""

    def __init__(
        self,
        candidates: tuple[Candidate, ...],
        points: Mapping[Knobs, SearchPoint],
        failed: Iterable[Knobs],
        capacity: int,
    ) -> None:
        self._candidates, self._points, self._capacity = candidates, points, capacity
        self._excluded = {*points, *failed}
        self._written = points[Knobs()]
        self._altering = [(one.knobs.changed().items(), one.field) for one in candidates if one.alters]
        fitting = {knobs: point for knobs, point in points.items() if point.fits}
        self._fitting = [(knobs, point, set(self._altered(knobs))) for knobs, point in fitting.items()]
        self._fits_in_micro_batches = {knobs.replace(accumulation=None) for knobs in fitting}
        limit = self._written.time * ACCEPTABLE_SLOW_DOWN
        acceptable = [altered for _, point, altered in self._fitting if point.time <= limit]
        self._max_altered = min(map(len, acceptable), default=len(self._altering))

    def combinations(self, singles: Mapping[Knobs, SearchPoint]) -> Iterator[tuple[Knobs, SearchPoint]]:
        """Yield settings that were run with one more knob changed, and their estimates; some more than once.

        `singles` has the points of the candidates.
        """
        changes = {change for one in self._candidates for change in one.knobs.changed().items()}
        for knobs, point in self._points.items():
            if not knobs.changed().items() <= changes:
                continue
            for one in self._candidates:
                single = singles[one.knobs]
                if one.field in knobs.changed() or (point.fits and single.time >= self._written.time):
                    continue
                both = knobs.replace(**one.knobs.changed())
                if self._is_excluded(both) or cannot_fit(point, one.knobs, self._capacity):
                    continue
                estimate = combined(point, single, self._written)
                if not self._is_needless(both, estimate):
                    yield both, estimate

    def _altered(self, knobs: Knobs) -> tuple[str, ...]:
        """Return the fields that change the training."""
        return tuple(field for change, field in self._altering if change <= knobs.changed().items())

    def _is_excluded(self, knobs: Knobs) -> bool:
        """Return whether a setting was run, cannot be run, alters more than is needed or has too many micro-batches."""
        return bool(
            knobs in self._excluded
            or conflicts(knobs)
            or len(self._altered(knobs)) > self._max_altered
            or (knobs.accumulation and knobs.replace(accumulation=None) in self._fits_in_micro_batches)
        )

    def _is_needless(self, knobs: Knobs, estimate: SearchPoint) -> bool:
        """Return whether a setting that fits has fewer changes and is as fast, or is expected to beat the setting."""
        changed, altered = knobs.changed(), set(self._altered(knobs))
        for other, point, its in self._fitting:
            if point.time > estimate.time * _AS_FAST or other == Knobs():
                continue
            if other.changed().items() <= changed.items():
                return True
            rounds_the_same = "precision" not in other.changed() or "precision" in changed
            smaller = point.needed <= estimate.needed and len(other.changed()) <= len(changed)
            if smaller and its <= altered and rounds_the_same:
                return True
        return False

    def merit(self, knobs: Knobs, estimate: SearchPoint) -> _Merit:
        """Return the key that sorts a setting among others."""
        is_expected_too_large = estimate.needed > self._capacity
        return _Merit(
            estimate.constant > self._capacity,
            is_expected_too_large,
            len(self._altered(knobs)),
            estimate.needed if is_expected_too_large else estimate.time,
            len(knobs.changed()),
            str(knobs),
        )

    def in_turns(self, merits: Mapping[Knobs, _Merit]) -> list[Knobs]:
        """Return settings in such an order that fields that change the training take turns; `merits` is sorted.

        The search cannot know which of these fields a person accepts.
        """
        turns: Counter[tuple[Any, ...]] = Counter()
        turn_of: dict[Knobs, tuple[Any, ...]] = {}
        for knobs, merit in merits.items():
            turns[merit[:3], self._altered(knobs)] += 1
            turn_of[knobs] = (merit[:3], turns[merit[:3], self._altered(knobs)])
        return sorted(turn_of, key=lambda knobs: turn_of[knobs])


def _micro_batched(rivals: list[Knobs], expected_to_fit: list[Knobs]) -> Knobs:
    """Of settings that differ only in micro-batches, the one with the fewest expected to fit, else with the most."""
    if expected_to_fit:
        return min(expected_to_fit, key=lambda knobs: knobs.accumulation or 1)
    return max(rivals, key=lambda knobs: knobs.accumulation or 1)
