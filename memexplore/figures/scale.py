"""How high a timeline is, and where its capacity is told: the same in the interactive and the static picture."""

from __future__ import annotations

from typing import NamedTuple

from memexplore.analysis.curves import peak
from memexplore.tape import Tape
from memexplore.units import size_text

_FAR = 2.5
"""A capacity more than this many times the peak reserved would squash the picture, so it is told in words."""
_CLOSE = 1.12
"""Below this many times the peak reserved there is no room for a label between the two lines."""


class Scale(NamedTuple):
    """Heights in bytes of what a timeline marks."""

    allocated: int
    row: int
    """Row of the peak allocated, -1 on an empty tape."""
    highest: int
    """Highest value of any curve, at least 1."""
    ceiling: int
    """Highest line that is drawn."""
    label: int
    """Line above which the label of the peak stands, so that no line crosses it."""
    capacity: int | None
    """Where the capacity line is drawn; None where there is none or it is too far up."""
    capacity_text: str
    """The capacity in words; empty where there is none."""


def scale(tape: Tape, beside: int = 0) -> Scale:
    """The heights of a tape's timeline; `beside` is the peak of another curve that has to have room, in bytes.

    >>> from memexplore.tape import Meta, Source
    >>> tape = Tape.from_columns({"address": [0], "size": [512]}, meta=Meta(Source.MEASURED, "cpu", capacity=51200))
    >>> scale(tape).ceiling, scale(tape).capacity_text
    (512, 'capacity 50.0 KiB, 100 times the peak reserved ↑')

    Raises ValueError where the tape is not placed.
    """
    allocated, row = peak(tape)
    highest, capacity = max(peak(tape, "reserved")[0], allocated, 1), tape.meta.capacity
    tallest = max(highest, beside)
    if capacity is None:
        return Scale(allocated, row, highest, tallest, tallest, None, "")
    text = f"capacity {size_text(capacity)}"
    if capacity > _FAR * tallest:
        times = capacity / highest
        if allocated:
            text += f", {times:.{1 if times < 9.95 else 0}f} times the peak reserved ↑"
        return Scale(allocated, row, highest, tallest, tallest, None, text)
    ceiling = max(tallest, capacity)
    label = ceiling if capacity < _CLOSE * tallest else tallest
    return Scale(allocated, row, highest, ceiling, label, capacity, text)
