"""One tape beside another: which of their rows are the same moment of the same step."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from memexplore.figures import bands
from memexplore.tape import Tape


def _borders(tape: Tape) -> dict[tuple[str, str, int], int]:
    """Where each phase of each step begins, by step, phase and how often the phase was there before in the step."""
    window = (0, len(tape))
    steps = bands.steps(tape, window)
    found = {(step.text, "", 0): step.first for step in steps}
    counts: dict[tuple[str, str], int] = {}
    for phase in bands.phases(tape, window):
        step = next((step.text for step in steps if step.first <= phase.first < step.last), "")
        number = counts[step, phase.text] = counts.get((step, phase.text), 0) + 1
        found[step, phase.text, number] = phase.first
    return found


def matching_rows(rows: NDArray[np.float64], tape: Tape, other: Tape) -> NDArray[np.float64]:
    """Where some rows of a tape lie on another tape: phase by phase and step by step, stretched evenly between.

    >>> from memexplore.tape import Meta, Source
    >>> short, long = (Tape.from_columns({"step": [1] * count + [2] * count}, meta=Meta(Source.MEASURED, "cpu"))
    ...                for count in (2, 4))
    >>> matching_rows(np.array([0.0, 1.0, 2.0, 4.0]), short, long).tolist()
    [0.0, 2.0, 4.0, 8.0]

    Rows beyond the last border that both tapes have are stretched up to the end of both.
    """
    rows = np.asarray(rows, dtype=np.float64)
    if not len(tape) or not len(other):
        return rows
    here, there = _borders(tape), _borders(other)
    pairs = sorted((row, there[border]) for border, row in here.items() if border in there)
    # Phases may come in another order where the batch is cut into micro-batches.
    kept = [(0, 0)]
    for row, its in pairs:
        if row > kept[-1][0] and its > kept[-1][1]:
            kept.append((row, its))
    if set(here) == set(there) or not len(pairs):
        kept.append((len(tape), len(other)))
    else:
        # One of the two ended early: its last rows are not stretched over what the other did afterwards.
        left = max(len(tape) - kept[-1][0], 1)
        kept.append((kept[-1][0] + left, kept[-1][1] + left))
    before, after = np.array(kept, dtype=np.float64).T
    return np.interp(rows, before, after)


def matching_window(window: tuple[float, float] | None, tape: Tape, other: Tape) -> tuple[float, float] | None:
    """The same window on another tape; None, which is all of it, stays None."""
    if window is None:
        return None
    low, high = matching_rows(np.array(sorted(window)), tape, other).tolist()
    return low, high
