"""List the segments of a Tape: address, length and stream of the memory that the allocator holds at the end."""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort
from collections.abc import Iterable

import numpy as np

from memexplore.allocator.actions import SEGMENT_ACTIONS
from memexplore.tape import Action, Tape
from memexplore.tape.allocator_settings import SMALL_SEGMENT


class MappedRanges:
    """Mapped ranges of expandable segments: start address to end address and stream; ranges do not overlap.

    >>> ranges = MappedRanges([(0, 10, 7)])
    >>> ranges.add(10, 20, 7); ranges.remove(5, 8); ranges.all()
    [(0, 5, 7), (8, 20, 7)]
    """

    def __init__(self, ranges: Iterable[tuple[int, int, int]] = ()) -> None:
        self._runs: dict[int, tuple[int, int]] = {}
        self._starts: list[int] = []
        """Keys of `_runs`, sorted: a tape may have a hundred thousand ranges."""
        for start, end, stream in ranges:
            self.add(start, end, stream)

    def all(self) -> list[tuple[int, int, int]]:
        """Return start, end and stream of each range, by address."""
        return [(start, *self._runs[start]) for start in self._starts]

    def remove(self, start: int, end: int) -> None:
        """Remove a range."""
        first = max(bisect_right(self._starts, start) - 1, 0)
        last = bisect_left(self._starts, end)
        begins = [begin for begin in self._starts[first:last] if start < self._runs[begin][0]]
        if not begins or start >= end:
            return
        removed = [(begin, *self._runs.pop(begin)) for begin in begins]
        at = bisect_left(self._starts, begins[0])
        del self._starts[at : at + len(begins)]
        for begin, stop, stream in removed:
            if begin < start:
                self._insert(begin, start, stream)
            if end < stop:
                self._insert(end, stop, stream)

    def add(self, start: int, end: int, stream: int) -> None:
        """Add a range, joined with adjacent ranges of its stream, in place of what overlaps it."""
        if start >= end:
            return
        self.remove(start, end)
        at = bisect_left(self._starts, start)
        if at < len(self._starts) and self._starts[at] == end and self._runs[end][1] == stream:
            end = self._runs.pop(self._starts.pop(at))[0]
        if at and self._runs[self._starts[at - 1]] == (start, stream):
            start = self._starts[at - 1]
            self._runs[start] = (end, stream)
        else:
            self._insert(start, end, stream)

    def _insert(self, start: int, end: int, stream: int) -> None:
        insort(self._starts, start)
        self._runs[start] = (end, stream)


def segments_at_end(tape: Tape) -> list[tuple[int, int, int, bool, bool]]:
    """Return (start, end, stream, is expandable, is small) of each segment at the end of a tape, sorted by address."""
    fixed: dict[int, tuple[int, int]] = {}
    mapped = {True: MappedRanges(), False: MappedRanges()}
    rows = np.flatnonzero(np.isin(tape.action, SEGMENT_ACTIONS))
    columns = (tape.action[rows], tape.address[rows], tape.size[rows], tape.stream[rows])
    for action, address, size, stream in zip(*(column.tolist() for column in columns), strict=True):
        if action == Action.SEGMENT_ALLOC:
            fixed[address] = (address + size, stream)
        elif action == Action.SEGMENT_FREE:
            fixed.pop(address, None)
        elif action == Action.SEGMENT_MAP:
            # A request of the small pool maps one page, which no request of the large pool does.
            mapped[size == SMALL_SEGMENT].add(address, address + size, stream)
        else:
            for runs in mapped.values():
                runs.remove(address, address + size)
    segments = [
        (address, end, stream, False, end - address == SMALL_SEGMENT) for address, (end, stream) in fixed.items()
    ]
    for small, runs in mapped.items():
        segments += [(start, end, stream, True, small) for start, end, stream in runs.all()]
    return sorted(segments)
