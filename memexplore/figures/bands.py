"""Steps and phases along a timeline, and which of their labels there is room for."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from memexplore.tape import Action, Phase, Tape


class Band(NamedTuple):
    """Rows ``first`` to ``last`` (exclusive) that belong together, and the words for them."""

    first: int
    last: int
    text: str
    phase: Phase | None = None


def _runs(tape: Tape, window: tuple[int, int], keys: tuple[str, ...]) -> list[tuple[int, int, int]]:
    """First row, last row (exclusive) and the mark of each run with equal keys, cut to the window."""
    marks = np.flatnonzero(tape.action == Action.MARK)
    if not len(marks):
        if not tape.step.any():
            return []
        # An imported tape has no marks: its borders are where step or phase change.
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
    """The training steps in a window of rows, with what comes before the first as `set-up`."""
    runs = _runs(tape, window, ("step",))
    bands = [
        Band(first, last, f"step {int(tape.step[mark])}" if tape.step[mark] else "set-up") for first, last, mark in runs
    ]
    begins = bands[0].first if bands else window[0]
    if bands and begins > window[0]:
        bands.insert(0, Band(window[0], begins, "set-up"))
    return bands


def phases(tape: Tape, window: tuple[int, int]) -> list[Band]:
    """The phases in a window of rows; what lies outside forward, backward and optimizer is left out."""
    named = [
        Band(first, last, Phase(int(tape.phase[mark])).text, Phase(int(tape.phase[mark])))
        for first, last, mark in _runs(tape, window, ("step", "phase"))
    ]
    return [band for band in named if band.phase is not Phase.OTHER]


def with_visible_label(bands: list[Band], window: tuple[int, int], pixels: float, letter: float = 6.5) -> list[Band]:
    """The bands whose text fits with a letter's room on both sides, at a plot's width and `letter` pixels a letter.

    Each band has its own room, so texts cannot overlap. Where no step has room for its text, every second, fifth,
    tenth and so on keeps it and borrows the room of its neighbours.
    """
    width = max(window[1] - window[0], 1)

    def room(band: Band) -> float:
        return (band.last - band.first) / width * pixels

    fitting = [band for band in bands if room(band) >= (len(band.text) + 2) * letter]
    if 2 * len(fitting) >= len(bands) or not bands or bands[0].phase is not None:
        return fitting
    kept: list[Band] = []
    needed = (max(len(band.text) for band in bands) + 2) * letter * width / pixels
    for every in (2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10_000, 100_000):
        kept = [band for band in bands if band.text[5:].isdigit() and int(band.text[5:]) % every == 0]
        centres = np.array([(band.first + band.last) / 2 for band in kept])
        if not len(kept) or len(kept) == 1 or np.min(np.diff(centres)) >= needed:
            return kept
    return kept
