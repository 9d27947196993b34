"""Find leaks: memory that rises from step to step, and the line of code that keeps it.

Two facts are used. Where the device counts, the bytes at the border of steps that are never given back again must rise
to the end, as in `analysis.growth`. And of each recorded step, the blocks that it left are followed by weak references:
a place in the code whose blocks of many recorded steps are all still alive keeps them. The second names the place, and
finds leaks of the CPU, where nothing is counted.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from memexplore.analysis.growth import LONGEST_TRAINING, median_slope, rises_to_the_end, usual_deviations
from memexplore.analysis.places import name_cells
from memexplore.analysis.tables import user_line
from memexplore.live import holders
from memexplore.live.recording import Survivor
from memexplore.ranks.rows import StepRow
from memexplore.tape import Frame
from memexplore.text.units import size_text

_LEAST_STEPS = 8
"""Steps after the warm-up from which growth is judged."""
_LEAST_RECORDED = 3
_WARM_UP = 2
_POINTS = 100
_MORE_STEPS = 24
"""Steps from which growth is judged where sizes vary."""
_LAST_SIZES = 3
_CHECKED_EVERY = 16
_KEPT_EARLY, _KEPT_LATE = 4, 12
"""Recorded steps whose blocks are followed: the first ones and the newest ones."""


class Leak(NamedTuple):
    """Memory at the border of steps that keeps rising."""

    bytes_per_step: int
    since: int
    """The first step after which it rose."""
    full_at: int | None
    """The step in which the device would be full, None without a capacity."""
    layer: str
    line: str
    """Layer and line that allocated most of it, "" where no recorded step shows them."""
    blocks: int
    """Blocks of recorded steps that are still alive."""

    @property
    def text(self) -> str:
        """The leak as one sentence."""
        where, line = "", name_cells(self.line)
        if self.layer:
            where = f", allocated in {self.layer}" + (f" ({line})" if line else "")
        elif line:
            where = f", allocated at {line}"
        full = f"; full at about step {self.full_at:,}" if self.full_at is not None else ""
        return f"Memory grows by {size_text(self.bytes_per_step)} a step since step {self.since}{where}{full}."


class _Place(NamedTuple):
    layer: str
    line: str


class Leaks:
    """Follows the memory at the borders of steps."""

    def __init__(self, capacity: Callable[[], int | None]) -> None:
        self._capacity = capacity
        self._points: list[tuple[int, int]] = []
        """Step and bytes held after it, requested ones if they are counted, thinned by dropping every second point."""
        self._stride = 1
        self._used = 0
        """Bytes reserved, or the peak where nothing is reserved."""
        self._last = 0
        self._early: list[tuple[int, list[Survivor]]] = []
        self._late: deque[tuple[int, list[Survivor]]] = deque(maxlen=_KEPT_LATE)
        self.rising = False
        """Whether memory at the border of steps kept rising when it was last judged."""

    def add(self, row: StepRow, survivors: Sequence[Survivor]) -> None:
        """Add a finished step and what it left, if it was recorded."""
        self._last = row.step
        if row.step > _WARM_UP:
            self._used = row.reserved_after or row.peak_allocated or self._used
            # The remainders of blocks differ from step to step also where nothing grows.
            held = row.allocated_after if row.requested_after is None else row.requested_after
            if held is not None and row.reserved_after is not None:
                if row.step % self._stride == 0:
                    self._points.append((row.step, held))
                if len(self._points) > 2 * _POINTS:
                    self._points, self._stride = self._points[1::2], 2 * self._stride
            if survivors:
                kept = (row.step, list(survivors))
                if len(self._early) < _KEPT_EARLY:
                    self._early.append(kept)
                else:
                    self._late.append(kept)
        if row.step % _CHECKED_EVERY == 0:
            self.rising = self._slope() is not None

    def wants_a_tape(self, step: int) -> bool:
        """Return whether a recorded step would help to name the place of a leak."""
        return self.rising and step % _CHECKED_EVERY == 0 and self._growing_place() is None

    def find(self) -> Leak | None:
        """Return the leak, None where memory does not keep rising."""
        slope, place = self._slope(), self._growing_place()
        if slope is None and (place is None or self._points):
            return None
        layer, line, rate, blocks, since = "", "", 0, 0, 0
        if place is not None:
            (layer, line), alive = place
            steps = {survivor.step for survivor in alive}
            rate, blocks, since = sum(survivor.size for survivor in alive) // len(steps), len(alive), min(steps)
        if slope is not None:
            rate, since = slope
        if not self._matters(rate):
            return None
        full_at = None
        if self._capacity() is not None:
            full_at = self._last + math.ceil(self._room() / rate)
        return Leak(rate, since, full_at, layer, line, blocks)

    def held_by(self, seconds: float = 5.0) -> list[str]:
        """Return who holds the tensors of the leak, as far as Python can say within `seconds`."""
        if self.find() is None:
            return []
        groups = [[survivor.storage() for survivor in alive] for _, alive in self._growing_places()]
        return holders.holders([[storage for storage in group if storage is not None] for group in groups], seconds)

    def _slope(self) -> tuple[int, int] | None:
        """Return bytes per step and the step since which memory at the border rises, None where it does not."""
        points = self._points[:: max(len(self._points) // _POINTS, 1)]
        if len(points) < _LEAST_STEPS:
            return None
        steps, sizes = np.array(points, dtype=np.int64).T
        kept = np.minimum.accumulate(sizes[::-1])[::-1]
        # Growth may begin late: it is judged from the last step that had no more than the first ones.
        start = int(np.flatnonzero(kept == kept[0])[-1])
        if len(kept) - start < _LEAST_STEPS or not rises_to_the_end(kept[start:]):
            return None
        # The lowest of the last sizes, as one alone may be high by chance.
        variation = _variation(sizes, kept)
        if variation and (len(kept) - start < _MORE_STEPS or kept[-_LAST_SIZES] - kept[start] <= variation):
            return None
        rate = round(median_slope(steps[start:].astype(np.float64), kept[start:]))
        return (rate, int(steps[start])) if self._matters(rate) else None

    def _room(self) -> int:
        """Bytes that growth can still take; without a capacity as many as are used."""
        capacity = self._capacity()
        return self._used if capacity is None else max(capacity - self._used, 0)

    def _matters(self, rate: int) -> bool:
        return rate > 0 and self._room() / rate <= LONGEST_TRAINING

    def _growing_place(self) -> tuple[_Place, list[Survivor]] | None:
        """Return layer and line with the most bytes alive of many recorded steps, and their blocks."""
        return next(iter(self._growing_places()), None)

    def _growing_places(self) -> list[tuple[_Place, list[Survivor]]]:
        """Return layers and lines with blocks alive of many recorded steps, the most bytes first.

        Of the recorded steps those count in which memory rises, as far as that is known: a leak may begin late.
        """
        slope = self._slope()
        since = 0 if slope is None else slope[1]
        survivors: dict[_Place, list[Survivor]] = {}
        for kept in (*self._early, *self._late):
            kept[1][:] = [survivor for survivor in kept[1] if survivor.storage() is not None]
            for survivor in kept[1]:
                # The newest steps' blocks may be the input and the loss of the next step.
                if survivor.step < self._last - 1:
                    survivors.setdefault(_Place(survivor.layer, _line(survivor.stack)), []).append(survivor)
        recorded = [step for step, _ in (*self._early, *self._late) if since <= step < self._last - 1]
        growing = [(place, alive) for place, alive in survivors.items() if _of_most_steps(alive, recorded)]
        return sorted(growing, key=lambda item: -sum(survivor.size for survivor in item[1]))


def _variation(sizes: NDArray[np.int64], kept: NDArray[np.int64]) -> float:
    """Return the bytes by which sizes vary from step to step without growing, because blocks are rounded.

    `kept` are the lowest later sizes. Sizes that only vary rise by chance by less.
    """
    changes = np.diff(sizes)
    return max(float(usual_deviations(sizes, kept)), 4 * float(np.median(np.abs(changes - np.median(changes)))))


def _of_most_steps(alive: list[Survivor], recorded: Sequence[int]) -> bool:
    steps = {survivor.step for survivor in alive}
    return len(steps) >= max(_LEAST_RECORDED, math.ceil(0.6 * len(recorded)))


def _line(stack: tuple[Frame, ...]) -> str:
    return user_line(stack) if stack else ""
