"""Choose the vertical scale of a timeline and the position of its capacity, for the interactive and static figure."""

from __future__ import annotations

from typing import NamedTuple

from memexplore.analysis.curves import CurveName, curve, peak
from memexplore.analysis.picture import refused
from memexplore.tape import Tape
from memexplore.text.units import size_text

_MAX_DRAWN_CAPACITY = 2.5
"""A capacity above this multiple of the peak reserved would flatten the curves, so it is only a text."""
_MAX_DRAWN_REQUEST = 2
"""Multiple of capacity or peak reserved up to which a request that failed is drawn whole."""
_CURVES: tuple[CurveName, ...] = ("allocated", "reserved")


class Scale(NamedTuple):
    """Vertical positions in a timeline, in bytes."""

    allocated: int
    """The peak allocated."""
    row: int
    """Row of the peak allocated, -1 on an empty tape."""
    highest: int
    """Highest value of any curve, at least 1."""
    ceiling: int
    """Highest line in the figure."""
    capacity: int | None
    """Position of the capacity line; None without a capacity or for one too far above the curves."""
    capacity_text: str
    """Label of the capacity, or of the limit of the process; empty without a capacity."""


def scale(tape: Tape, other_peak: int = 0, rows: tuple[int, int] | None = None) -> Scale:
    """Return the vertical scale of a tape's timeline.

    `other_peak` is the peak in bytes of a second curve in it, `rows` are the first and last row shown (default: all).

    >>> from memexplore.tape import Meta, Source
    >>> tape = Tape.from_columns({"address": [0], "size": [512]}, meta=Meta(Source.MEASURED, "cpu", capacity=51200))
    >>> scale(tape).ceiling, scale(tape).capacity_text
    (512, 'capacity 50.0 KiB, 100 times the peak reserved ↑')

    Raises ValueError for a tape that is not placed.
    """
    allocated, row = peak(tape)
    highest, capacity = max(peak(tape, "reserved")[0], allocated, 1), tape.meta.capacity
    tallest = max(highest, other_peak)
    if rows is not None and rows[1] - rows[0] < len(tape) - 1:
        shown = slice(rows[0], rows[1] + 1)
        tallest = int(max(*(curve(tape, name)[shown].max(initial=1) for name in _CURVES)))
    if (end := refused(tape)) is not None and (rows is None or rows[1] == len(tape) - 1):
        # A request far beyond the curves is cut off by the top of the axis.
        tallest = max(tallest, min(end.allocated + end.requested, _MAX_DRAWN_REQUEST * max(highest, capacity or 0)))
    if capacity is None:
        return Scale(allocated, row, highest, tallest, None, "")
    text = f"{'capacity' if tape.meta.capacity_without_limit is None else 'limit'} {size_text(capacity)}"
    if capacity > _MAX_DRAWN_CAPACITY * tallest:
        times = capacity / highest
        if allocated:
            text += f", {times:.{1 if times < 9.95 else 0}f} times the peak reserved ↑"
        return Scale(allocated, row, highest, tallest, None, text)
    ceiling = max(tallest, capacity)
    return Scale(allocated, row, highest, ceiling, capacity, text)
