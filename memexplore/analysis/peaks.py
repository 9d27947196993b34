"""Compute the peaks of a tape by category, layer and step, as the header of its file has them."""

from __future__ import annotations

import numpy as np

from memexplore.analysis.curves import Rows, block_bytes, category_bytes, curve, live_rows, peak
from memexplore.analysis.tables import NO_LAYER
from memexplore.tape import Category, Tape
from memexplore.tape.peaks import Peaks, StepPeaks

_LAYERS = 100


def peaks(tape: Tape) -> Peaks | None:
    """Return the peaks of a tape; None for a tape that is not placed.

    >>> from memexplore.tape import Meta, Source
    >>> tape = Tape.from_columns({"address": [0, 512], "size": [10, 20], "step": [0, 1]},
    ...                          meta=Meta(Source.MEASURED, "cpu"))
    >>> peaks(tape).by_category, [(step.step, step.allocated) for step in peaks(tape).steps]
    ({'unknown': 30}, [(0, 10), (1, 30)])
    """
    try:
        allocated, row = peak(tape)
    except ValueError:
        return None
    if not len(tape):
        return Peaks(0, 0, -1, {}, {})
    shares = category_bytes(tape, row)
    by_category = {kind.text: int(shares[kind]) for kind in Category if shares[kind]}
    return Peaks(allocated, peak(tape, "reserved")[0], row, by_category, _by_layer(tape, row), _steps(tape))


def _by_layer(tape: Tape, row: int) -> dict[str, int]:
    """Return the bytes that the largest layers have allocated after a row."""
    live = live_rows(tape, row)
    # The module -1, none, is the last entry.
    sums = np.zeros(len(tape.modules) + 1, dtype=np.int64)
    np.add.at(sums, tape.module[live], block_bytes(tape)[live])
    names = (*tape.modules, NO_LAYER)
    largest = np.argsort(-sums, kind="stable")[:_LAYERS]
    return {names[index]: int(sums[index]) for index in largest if sums[index] > 0}


def _steps(tape: Tape) -> tuple[StepPeaks, ...]:
    """Return the peaks of each step, in order."""
    begins = np.flatnonzero(np.append(True, tape.step[1:] != tape.step[:-1]))
    steps, which = np.unique(tape.step[begins], return_inverse=True)
    last = np.zeros(len(steps), dtype=np.int64)
    last[which] = np.append(begins[1:], len(tape)) - 1
    columns = []
    for values in (curve(tape, "allocated"), curve(tape, "reserved")):
        columns += [_highest(np.maximum.reduceat(values, begins), which, len(steps)), values[last]]
    allocated, allocated_after, reserved, reserved_after = (column.tolist() for column in columns)
    return tuple(map(StepPeaks, steps.tolist(), allocated, reserved, allocated_after, reserved_after))


def _highest(values: Rows, which: Rows, count: int) -> Rows:
    """Return the highest value of each group of values."""
    result = np.zeros(count, dtype=np.int64)
    np.maximum.at(result, which, values)
    return result
