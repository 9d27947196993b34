"""Time against memory: one point a setting, and the frontier on which no setting is beaten by another."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from memexplore.tape import Source


class Point(NamedTuple):
    """What one setting costs in time and needs in memory."""

    setting: str
    """The knobs in words."""
    slow_down: float
    """Time of a sample over the time of a sample as written; 1 is as fast."""
    extra_flops: float
    """Share of FLOPs beyond those as written, for a sample: 0.31 is 31 % more."""
    peak_reserved: int
    """Bytes that the setting needs, more than the GPU has where it does not fit."""
    fits: bool
    source: Source = Source.PREDICTED
    """Whether memory and time were measured."""


def frontier(points: Sequence[tuple[float, float]]) -> tuple[int, ...]:
    """Which (time, memory) pairs no other pair beats, fastest first: none is as small in both and smaller in one.

    Of equal pairs the first counts; a pair that is not a number is never one of them.

    >>> frontier([(1.0, 8), (1.3, 4), (1.5, 5), (2.0, 3)])
    (0, 1, 3)
    """
    known = [number for number, (time, memory) in enumerate(points) if time == time and memory == memory]
    lowest, kept = float("inf"), []
    for number in sorted(known, key=lambda number: (*points[number], number)):
        if points[number][1] < lowest:
            lowest = points[number][1]
            kept.append(number)
    return tuple(kept)
