"""Combinations of knobs to run next. Nothing is run here.

In: candidates and the `SearchPoint`s of the settings that were run. Out: the settings to run next, best estimate first.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any

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
    written, candidates = points[Knobs()], tuple(candidates)
    singles = {**(estimates or {}), **points}
    altering = [(one.knobs.changed().items(), one.field) for one in candidates if one.alters]

    def altered_fields(knobs: Knobs) -> tuple[str, ...]:
        return tuple(field for change, field in altering if change <= knobs.changed().items())

    limit = written.time * ACCEPTABLE_SLOW_DOWN
    acceptable = [knobs for knobs, point in points.items() if point.fits and point.time <= limit]
    max_altered = min((len(altered_fields(knobs)) for knobs in acceptable), default=len(altering))
    fits_in_micro_batches = {knobs.replace(accumulation=None) for knobs, point in points.items() if point.fits}
    fitting = [(knobs, point, set(altered_fields(knobs))) for knobs, point in points.items() if point.fits]
    excluded = {*points, *failed}
    changes = {change for one in candidates for change in one.knobs.changed().items()}

    def is_needless(knobs: Knobs, estimate: SearchPoint) -> bool:
        changed, altered = knobs.changed(), set(altered_fields(knobs))
        for other, point, its in fitting:
            if point.time > estimate.time * _AS_FAST or other == Knobs():
                continue
            if other.changed().items() <= changed.items():
                return True
            rounds_the_same = "precision" not in other.changed() or "precision" in changed
            smaller = point.needed <= estimate.needed and len(other.changed()) <= len(changed)
            if smaller and its <= altered and rounds_the_same:
                return True
        return False

    order: dict[Knobs, tuple[Any, ...]] = {}
    for knobs, point in points.items():
        if not knobs.changed().items() <= changes:
            continue
        for one in candidates:
            single = singles[one.knobs]
            if one.field in knobs.changed() or (point.fits and single.time >= written.time):
                continue
            both = knobs.replace(**one.knobs.changed())
            if both in excluded or conflicts(both) or len(altered_fields(both)) > max_altered:
                continue
            if both.accumulation and both.replace(accumulation=None) in fits_in_micro_batches:
                continue
            estimate = combined(point, single, written)
            if cannot_fit(point, one.knobs, capacity) or is_needless(both, estimate):
                continue
            expected_to_fit = estimate.needed <= capacity
            # Where weights, gradients and optimizer state alone are too large, saving activations cannot help.
            merit = (
                estimate.constant > capacity,
                not expected_to_fit,
                len(altered_fields(both)),
                estimate.time if expected_to_fit else estimate.needed,
            )
            key = (*merit, len(both.changed()), str(both))
            order[both] = min(key, order.get(both, key))
    ordered = sorted(order, key=lambda knobs: order[knobs])
    by_count: dict[Knobs, list[Knobs]] = {}
    for knobs in ordered:
        by_count.setdefault(knobs.replace(accumulation=None), []).append(knobs)
    chosen = {
        _micro_batched(rivals, [knobs for knobs in rivals if not order[knobs][1]]) for rivals in by_count.values()
    }
    # Fields that change the training take turns: the search cannot know which of them a person accepts.
    turns: Counter[tuple[Any, ...]] = Counter()
    turn_of: dict[Knobs, tuple[Any, ...]] = {}
    for knobs in filter(chosen.__contains__, ordered):
        merit = order[knobs][:3]
        turns[merit, altered_fields(knobs)] += 1
        turn_of[knobs] = (merit, turns[merit, altered_fields(knobs)])
    return sorted(turn_of, key=lambda knobs: turn_of[knobs])[:count]


def _micro_batched(rivals: list[Knobs], expected_to_fit: list[Knobs]) -> Knobs:
    """Of settings that differ only in micro-batches, the one with the fewest expected to fit, else with the most."""
    if expected_to_fit:
        return min(expected_to_fit, key=lambda knobs: knobs.accumulation or 1)
    return max(rivals, key=lambda knobs: knobs.accumulation or 1)
