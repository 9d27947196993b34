"""Find the bands of a timeline: row ranges of steps and phases, and the bands wide enough for their label."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from memexplore.analysis.verdict import failed_request
from memexplore.tape import Action, Phase, Tape

UNWINDING = "unwinding"
"""Label of the rows after a failed request, in which Python frees what the program held."""


class Band(NamedTuple):
    """The rows ``first`` to ``last`` (exclusive) of a step or phase, and its label."""

    first: int
    last: int
    text: str
    phase: Phase | None = None


def _runs(tape: Tape, window: tuple[int, int], keys: tuple[str, ...]) -> list[tuple[int, int, int]]:
    """Return first row, last row (exclusive) and starting mark of each run with equal keys, cut to the window."""
    marks = np.flatnonzero(tape.action == Action.MARK)
    if not len(marks):
        if not tape.step.any():
            return []
        # An imported tape has no marks: a run starts where step or phase change.
        marks = np.flatnonzero((np.diff(tape.step) != 0) | (np.diff(tape.phase) != 0)) + 1
        marks = np.append(0, marks)
    columns = np.stack([getattr(tape, key)[marks] for key in keys])
    differs = np.ones(len(marks), dtype=bool)
    differs[1:] = np.any(columns[:, 1:] != columns[:, :-1], axis=0)
    marks = marks[differs]
    edges = np.append(marks, len(tape))
    first, last = window
    cut = np.clip(edges, first, last)
    return [
        (int(start), int(stop), int(mark))
        for start, stop, mark in zip(cut[:-1], cut[1:], marks, strict=True)
        if stop > start
    ]


def steps(tape: Tape, window: tuple[int, int]) -> list[Band]:
    """Return the training steps in a window of rows; the rows before the first step are the band `set-up`."""
    runs = _runs(tape, window, ("step",))
    bands = [
        Band(first, last, f"step {int(tape.step[mark])}" if tape.step[mark] else "set-up") for first, last, mark in runs
    ]
    start = bands[0].first if bands else window[0]
    if bands and start > window[0]:
        bands.insert(0, Band(window[0], start, "set-up"))
    return bands


def phases(tape: Tape, window: tuple[int, int]) -> list[Band]:
    """Return the forward, backward and optimizer phases in a window of rows; after a failed request, `unwinding`."""
    stop = unwinding(tape)
    bands = [
        Band(first, min(last, stop), Phase(int(tape.phase[mark])).text, Phase(int(tape.phase[mark])))
        for first, last, mark in _runs(tape, window, ("step", "phase"))
    ]
    bands = [band for band in bands if band.phase is not Phase.OTHER and band.first < stop]
    if window[0] <= stop < window[1]:
        bands.append(Band(max(stop, window[0]), window[1], UNWINDING, Phase.OTHER))
    return bands


def unwinding(tape: Tape) -> int:
    """Return the row from which Python only frees what the failed program held; the length of the tape without one."""
    failed = failed_request(tape)
    is_over = failed >= 0 and not np.any(tape.action[failed:] == Action.ALLOC)
    return failed if is_over else len(tape)


def with_visible_label(bands: list[Band], pixels: Callable[[float], float], letter_pixels: float = 6.5) -> list[Band]:
    """Return the bands wide enough for their label plus one letter on both sides.

    `pixels` are the pixels of a row from the left of the plot, `letter_pixels` is the mean width of a letter. A label
    stays within its own band, so labels cannot overlap. If less than half of the steps are wide enough, the steps whose
    number is a multiple of 2, 5, 10, 20, ... keep their label, which extends over the neighbours.
    """
    fitting = [band for band in bands if pixels(band.last) - pixels(band.first) >= (len(band.text) + 2) * letter_pixels]
    if 2 * len(fitting) >= len(bands) or not bands or bands[0].phase is not None:
        return fitting
    kept: list[Band] = []
    label_pixels = (max(len(band.text) for band in bands) + 2) * letter_pixels
    for interval in (2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10_000, 100_000):
        kept = [band for band in bands if band.text[5:].isdigit() and int(band.text[5:]) % interval == 0]
        centres = np.array([(pixels(band.first) + pixels(band.last)) / 2 for band in kept])
        if not len(kept) or len(kept) == 1 or np.min(np.diff(centres)) >= label_pixels:
            return kept
    return kept
