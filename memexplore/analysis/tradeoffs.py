"""Weigh time against memory: one point per setting, and the Pareto frontier of the points."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from memexplore.tape import Source


class Point(NamedTuple):
    """Time and memory of one setting."""

    setting: str
    """The knobs as text."""
    slow_down: float
    """Time per sample relative to the step as written; 1 is as fast."""
    extra_flops: float
    """FLOPs per sample relative to the step as written, minus 1: 0.31 is 31 % more."""
    needed: int
    """The smallest capacity in bytes with which the setting runs; more than that of the GPU if it does not fit."""
    fits: bool
    source: Source = Source.PREDICTED
    """Origin of memory and time."""


def frontier(points: Sequence[tuple[float, float]]) -> tuple[int, ...]:
    """Return the indices of the Pareto-optimal (time, memory) pairs, fastest first.

    A pair is optimal if no other pair is at most as large in both values and smaller in one. Of equal pairs the first
    is returned; pairs with NaN never are.

    >>> frontier([(1.0, 8), (1.3, 4), (1.5, 5), (2.0, 3)])
    (0, 1, 3)
    """
    valid = [number for number, (time, memory) in enumerate(points) if time == time and memory == memory]
    lowest, kept = float("inf"), []
    for number in sorted(valid, key=lambda number: (*points[number], number)):
        if points[number][1] < lowest:
            lowest = points[number][1]
            kept.append(number)
    return tuple(kept)
