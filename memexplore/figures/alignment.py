"""Align two tapes of the same program: the row of one tape that matches a row of the other."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from memexplore.analysis.curves import peak
from memexplore.figures import bands
from memexplore.tape import Tape


def _boundaries(tape: Tape) -> dict[tuple[str, str, int], int]:
    """Return the first row of each step and phase, by step, phase and count of that phase within the step."""
    window = (0, len(tape))
    steps = bands.steps(tape, window)
    boundaries = {(step.text, "", 0): step.first for step in steps}
    counts: dict[tuple[str, str], int] = {}
    for phase in bands.phases(tape, window):
        step = next((step.text for step in steps if step.first <= phase.first < step.last), "")
        number = counts[step, phase.text] = counts.get((step, phase.text), 0) + 1
        boundaries[step, phase.text, number] = phase.first
    return boundaries


def matching_rows(rows: NDArray[np.float64], tape: Tape, other: Tape) -> NDArray[np.float64]:
    """Return the rows of another tape that match some rows of a tape, as floats.

    The first rows of a step or phase match; rows between two of them are interpolated linearly.

    >>> from memexplore.tape import Meta, Source
    >>> short, long = (Tape.from_columns({"step": [1] * count + [2] * count}, meta=Meta(Source.MEASURED, "cpu"))
    ...                for count in (2, 4))
    >>> matching_rows(np.array([0.0, 1.0, 2.0, 4.0]), short, long).tolist()
    [0.0, 2.0, 4.0, 8.0]

    Rows after the last common boundary are interpolated up to the ends of both tapes. If one tape ended early, they
    are shifted instead.
    """
    rows = np.asarray(rows, dtype=np.float64)
    if not len(tape) or not len(other):
        return rows
    boundaries, other_boundaries = _boundaries(tape), _boundaries(other)
    pairs = sorted((row, other_boundaries[key]) for key, row in boundaries.items() if key in other_boundaries)
    # Phases come in another order when the batch is split into micro-batches; `np.interp` needs rising rows.
    rising = [(0, 0)]
    for row, other_row in pairs:
        if row > rising[-1][0] and other_row > rising[-1][1]:
            rising.append((row, other_row))
    if set(boundaries) == set(other_boundaries) or not len(pairs):
        rising.append((len(tape), len(other)))
    else:
        # One tape ended early: its last rows must not be stretched over the remaining rows of the other.
        left = max(len(tape) - rising[-1][0], 1)
        rising.append((rising[-1][0] + left, rising[-1][1] + left))
    positions, other_positions = np.array(rising, dtype=np.float64).T
    return np.interp(rows, positions, other_positions)


def matching_window(window: tuple[float, float] | None, tape: Tape, other: Tape) -> tuple[float, float] | None:
    """Return the matching window of another tape; None, the whole tape, stays None."""
    if window is None:
        return None
    low, high = matching_rows(np.array(sorted(window)), tape, other).tolist()
    return low, high


def matching_row(row: int, tape: Tape, other: Tape) -> int:
    """Return the row of another tape that matches a row of a tape, such as the cursor.

    The highest row of one tape matches that of the other. So does a row of which one of both tapes has nothing: it
    comes after the request that failed. -1 for another tape without memory.
    """
    highest = peak(other)[1]
    if highest < 0 or row == peak(tape)[1] or row > bands.unwinding(tape):
        return highest
    matching = min(round(float(matching_rows(np.array([float(row)]), tape, other)[0])), len(other) - 1)
    return highest if matching > bands.unwinding(other) else matching


def clipped(window: tuple[float, float] | None, count: int) -> tuple[float, float] | None:
    """Return a window clipped to the rows of a tape; None if less than a row remains."""
    if window is None:
        return None
    low, high = max(window[0], 0.0), min(window[1], count - 1.0)
    return (low, high) if high - low >= 1 else None
