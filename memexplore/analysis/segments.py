"""Segments of a Tape: address, length and stream of the memory that the allocator holds at the end."""

from __future__ import annotations

import numpy as np

from memexplore.allocator.settings import SMALL_SEGMENT
from memexplore.tape import Action, Tape

_SEGMENT_ROWS = (Action.SEGMENT_ALLOC, Action.SEGMENT_FREE, Action.SEGMENT_MAP, Action.SEGMENT_UNMAP)


class MappedRanges:
    """Mapped ranges of expandable segments: start address to end address and stream."""

    def __init__(self, runs: dict[int, tuple[int, int]]) -> None:
        self.runs = runs

    def remove(self, start: int, end: int) -> None:
        """Remove a range."""
        for begin, (stop, stream) in list(self.runs.items()):
            if begin < end and start < stop:
                del self.runs[begin]
                if begin < start:
                    self.runs[begin] = (start, stream)
                if end < stop:
                    self.runs[end] = (stop, stream)

    def add(self, start: int, end: int, stream: int) -> None:
        """Add a range, joined with adjacent ranges of its stream."""
        for begin, (stop, other) in list(self.runs.items()):
            if other == stream and (stop == start or begin == end):
                del self.runs[begin]
                start, end = min(start, begin), max(end, stop)
        self.runs[start] = (end, stream)


def segments_at_end(tape: Tape) -> list[tuple[int, int, int, bool, bool]]:
    """Return (start, end, stream, is expandable, is small) of each segment at the end of a tape, sorted by address."""
    whole: dict[int, tuple[int, int]] = {}
    mapped = {True: MappedRanges({}), False: MappedRanges({})}
    rows = np.flatnonzero(np.isin(tape.action, _SEGMENT_ROWS))
    columns = (tape.action[rows], tape.address[rows], tape.size[rows], tape.stream[rows])
    for action, address, size, stream in zip(*(column.tolist() for column in columns), strict=True):
        if action == Action.SEGMENT_ALLOC:
            whole[address] = (address + size, stream)
        elif action == Action.SEGMENT_FREE:
            whole.pop(address, None)
        elif action == Action.SEGMENT_MAP:
            # A request of the small pool maps one page, which no request of the large pool does.
            mapped[size == SMALL_SEGMENT].add(address, address + size, stream)
        else:
            for runs in mapped.values():
                runs.remove(address, address + size)
    found = [(address, end, stream, False, end - address == SMALL_SEGMENT) for address, (end, stream) in whole.items()]
    for small, runs in mapped.items():
        found += [(start, end, stream, True, small) for start, (end, stream) in runs.runs.items()]
    return sorted(found)
