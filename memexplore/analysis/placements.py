"""Compute the range of peaks over placements: where the driver puts segments can change which free block is used.

The range of a tape that a virtual GPU made is over three placements of its segments, and over what the timing of the
GPU decides (`Meta.late_reserved`, `Meta.early_allocated`).
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from memexplore.allocator import Settings
from memexplore.allocator.placement import Downwards, Placement, placement_on
from memexplore.allocator.replay import release_of, replay_placed
from memexplore.analysis.curves import peak
from memexplore.tape import Action, Os, Source, Tape
from memexplore.tape.allocator_settings import Order, order_of
from memexplore.text.units import size_text


class PeakRanges(NamedTuple):
    """Lowest and highest peak over placements, in bytes, and whether the run can fit and can run out of memory."""

    allocated: tuple[int, int]
    reserved: tuple[int, int]
    fits: bool
    runs_out: bool


def peak_ranges(tape: Tape) -> PeakRanges | None:
    """Return the peaks of a tape over placements and timings of the GPU; None if they are unknown.

    The placements are that of the tape, that of Linux, segments upwards (WSL, Windows) and segments downwards. The
    requests are replayed under each. Placement has an effect only where the address decides between free blocks of
    equal size, that is up to torch 2.11 and without expandable segments; a measured tape has the placement of its
    driver. Unknown is the effect on a tape that begins with blocks, because the order of their requests is lost.

    >>> from memexplore.tape import Meta
    >>> rows = {"action": [Action.SEGMENT_ALLOC, Action.ALLOC], "address": [0, 0], "size": [2 << 20, 100]}
    >>> peak_ranges(Tape.from_columns(rows, meta=Meta(Source.PREDICTED, "T4", versions={"torch": "2.11"}))).allocated
    (512, 512)

    Raises ValueError for a tape that is not placed.
    """
    tapes = [tape]
    if _depends_on_placement(tape):
        if np.any(tape.action == Action.PREEXISTING):
            return None
        others: list[Placement] = [placement_on(system) for system in (Os.LINUX, Os.WSL) if system != tape.meta.os]
        tapes += [replay_placed(tape, placement) for placement in (*others, Downwards())]
    allocated, reserved = ([peak(placed, curve)[0] for placed in tapes] for curve in ("allocated", "reserved"))
    ends = [bool(np.any(placed.action == Action.OOM)) for placed in tapes]
    if tape.meta.late_reserved is not None:
        reserved.append(tape.meta.late_reserved)
        ends.append(tape.meta.late_reserved > (tape.meta.capacity or tape.meta.late_reserved))
    if tape.meta.early_allocated is not None and tape.meta.early_reserved is not None:
        allocated.append(tape.meta.early_allocated)
        reserved.append(tape.meta.early_reserved)
        ends.append(False)
    return PeakRanges((min(allocated), max(allocated)), (min(reserved), max(reserved)), not all(ends), any(ends))


def _depends_on_placement(tape: Tape) -> bool:
    return (
        tape.meta.source is Source.PREDICTED
        and order_of(release_of(tape)) is Order.ADDRESS
        and not Settings.parse(tape.meta.settings).expandable_segments
    )


def summary_ranges(tape: Tape) -> dict[str, list[int] | None]:
    """Return the peaks over placements as keys of the object of ``memexplore run --json``: `[lowest, highest]` or None.

    >>> from memexplore.tape import Meta
    >>> summary_ranges(Tape.from_columns({"address": [0], "size": [40]}, meta=Meta(Source.MEASURED, "cpu")))
    {'peak_allocated_range': [40, 40], 'peak_reserved_range': [40, 40]}
    """
    ranges = peak_ranges(tape)
    names = ("allocated", "reserved")
    return {f"peak_{name}_range": None if ranges is None else list(getattr(ranges, name)) for name in names}


def placement_note(tape: Tape) -> str | None:
    """Return a sentence with the peaks over placements, None if the placement changes nothing.

    >>> from memexplore.tape import Meta
    >>> placement_note(Tape.from_columns({"address": [0], "size": [40]}, meta=Meta(Source.MEASURED, "cpu")))
    """
    ranges = peak_ranges(tape)
    if ranges is None:
        return "How far the peak depends on the placement of segments is unknown: the tape begins with tensors."
    parts = []
    for name in ("allocated", "reserved"):
        (low, high), own = getattr(ranges, name), peak(tape, name)[0]
        if low != high:
            parts.append(f"the {name} one by {_signed(low - own)} to {_signed(high - own)}")
    ends = "; it can fit and can run out of memory" if ranges.fits and ranges.runs_out else ""
    if not parts and not ends:
        return None
    differ = f" can differ: {', '.join(parts)}" if parts else " are certain"
    return f"The driver of a real GPU may place segments at other addresses. The peaks{differ}{ends}."


def _signed(difference: int) -> str:
    return f"+{size_text(difference)}" if difference > 0 else size_text(difference)
