"""Keep the history of all steps in bounded memory: the recent steps as they are, older ones in bins.

Up to `CAPACITY` bins of one width cover all steps. When they are full, neighbours are merged and the width doubles, so
a run of any length takes the same memory. A bin keeps for each number the minimum, the median and the maximum, and the
whole row of the step with the highest peak.
"""

from __future__ import annotations

import statistics
import threading
from collections import deque
from collections.abc import Callable, Sequence
from typing import Generic, NamedTuple, TypeVar

CAPACITY = 1024
RECENT = 1024
_BATCH = 64

Row = TypeVar("Row")
Number = float | int | None


class Bin(NamedTuple, Generic[Row]):
    """Consecutive steps. Each tuple has one entry for each number of a row, None if no step of the bin has it."""

    first: int
    last: int
    """Numbers of the first and the last step."""
    steps: int
    low: tuple[Number, ...]
    middle: tuple[Number, ...]
    """The median; of merged bins the mean of the medians of both."""
    high: tuple[Number, ...]
    row: Row
    """The step with the highest peak."""


class History(Generic[Row]):
    """The rows of all steps, the newest exactly and older ones in bins.

    `numbers` gives the numbers of a row, `order` the number by which a bin keeps its highest row, `step` its step.
    """

    def __init__(
        self,
        numbers: Callable[[Row], Sequence[Number]],
        order: Callable[[Row], float],
        step: Callable[[Row], int],
        capacity: int = CAPACITY,
        recent: int = RECENT,
    ) -> None:
        self._numbers, self._order, self._step = numbers, order, step
        self._capacity = capacity + capacity % 2
        self._recent: deque[Row] = deque(maxlen=recent)
        self._bins: list[Bin[Row]] = []
        self._open: list[Row] = []
        """Rows of the bin that is not complete yet, but for the newest row."""
        self._width = 1
        self._newest: Row | None = None
        self._lock = threading.RLock()
        """The thread that trains adds rows while others read them."""

    def __len__(self) -> int:
        return sum(part.steps for part in self.bins())

    @property
    def newest(self) -> Row | None:
        """The row added last."""
        return self._newest

    def add(self, row: Row) -> None:
        """Add the row of a step."""
        with self._lock:
            if self._newest is not None:
                self._open.append(self._newest)
                # In batches, which run faster than one bin after each training step.
                if len(self._open) >= max(self._width, _BATCH):
                    self._close_bins()
            self._newest = row
            self._recent.append(row)

    def _close_bins(self) -> None:
        while len(self._open) >= self._width:
            self._bins.append(self._bin(self._open[: self._width]))
            del self._open[: self._width]
            if len(self._bins) >= self._capacity:
                self._merge()

    def replace_newest(self, row: Row) -> None:
        """Replace the row added last."""
        with self._lock:
            self._newest = self._recent[-1] = row

    def replace(self, step: int, change: Callable[[Row], Row]) -> None:
        """Change the row of a step where it is still kept."""
        with self._lock:
            for rows in (self._recent, self._open):
                for index in range(len(rows) - 1, -1, -1):
                    if self._step(rows[index]) == step:
                        rows[index] = change(rows[index])
            if self._newest is not None and self._step(self._newest) == step:
                self._newest = self._recent[-1]
            for index in range(len(self._bins) - 1, -1, -1):
                if self._step(self._bins[index].row) == step:
                    self._bins[index] = self._bins[index]._replace(row=change(self._bins[index].row))

    def bins(self) -> list[Bin[Row]]:
        """Return all steps in bins, in order, the newest one included."""
        with self._lock:
            self._close_bins()
            rest = [*self._open, *([] if self._newest is None else [self._newest])]
            return [*self._bins, self._bin(rest)] if rest else list(self._bins)

    def rows(self) -> list[Row]:
        """Return the recent rows, and before them of each bin of older steps the row with the highest peak."""
        with self._lock:
            recent = list(self._recent)
            if not recent:
                return []
            self._close_bins()
            first = self._step(recent[0])
            return [old.row for old in self._bins if self._step(old.row) < first] + recent

    def newest_rows(self, count: int) -> list[Row]:
        """Return the rows added last, at most `count` of them, in order."""
        with self._lock:
            return list(self._recent)[-count:]

    def after(self, step: int) -> list[Row] | None:
        """Return the rows after a step, None where not all of them are kept."""
        with self._lock:
            rows: list[Row] = []
            for row in reversed(self._recent):
                if self._step(row) <= step:
                    return rows[::-1]
                rows.append(row)
            return rows[::-1] if len(self._recent) < (self._recent.maxlen or 0) else None

    def _bin(self, rows: list[Row]) -> Bin[Row]:
        columns = list(zip(*map(self._numbers, rows), strict=True))
        present = [[value for value in column if value is not None] for column in columns]
        return Bin(
            self._step(rows[0]),
            self._step(rows[-1]),
            len(rows),
            tuple(min(column, default=None) for column in present),
            tuple(statistics.median(column) if column else None for column in present),
            tuple(max(column, default=None) for column in present),
            max(rows, key=self._order),
        )

    def _merge(self) -> None:
        pairs = zip(self._bins[::2], self._bins[1::2], strict=True)
        merged = [_merged(*pair, self._order) for pair in pairs]
        self._bins, self._width = merged, 2 * self._width


def _merged(left: Bin[Row], right: Bin[Row], order: Callable[[Row], float]) -> Bin[Row]:
    return Bin(
        left.first,
        right.last,
        left.steps + right.steps,
        tuple(_of_both(min, *pair) for pair in zip(left.low, right.low, strict=True)),
        tuple(_of_both(_mean, *pair) for pair in zip(left.middle, right.middle, strict=True)),
        tuple(_of_both(max, *pair) for pair in zip(left.high, right.high, strict=True)),
        max(left.row, right.row, key=order),
    )


def _mean(left: float, right: float) -> float:
    return (left + right) / 2


def _of_both(choose: Callable[[float, float], Number], left: Number, right: Number) -> Number:
    if left is None or right is None:
        return right if left is None else left
    return choose(left, right)
