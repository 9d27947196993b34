"""The driver's placement with segments at recorded addresses: before each new one it can be asked where it would go.

What the model prefers to a recorded address counts as used by something else of the process from then on: the CUDA
context, libraries and the rest of the address space are not recorded.
"""

from __future__ import annotations

from itertools import pairwise

from memexplore.allocator.placement import END, RANGE, FirstFit, LinuxPlacement, _Range


def _hull(address: int, size: int) -> tuple[int, int]:
    """Return the smallest range that holds a segment."""
    return address // RANGE * RANGE, -(-(address + size) // RANGE) * RANGE


class Followed(LinuxPlacement):
    """The placement on Linux with segments at recorded addresses."""

    def __init__(self, before: dict[int, int]) -> None:
        super().__init__()
        self._live: dict[_Range, int] = {}
        self._closed: list[tuple[int, int]] = []
        """Intervals outside ranges that seem to be used, or of which nothing shows whether they are free."""
        self._top = 0
        self._seed(before)

    def _seed(self, before: dict[int, int]) -> None:
        """Put the first segments into the smallest ranges; gaps between them are used by something else."""
        if not before:
            return
        hulls: list[list[int]] = []
        for address, size in sorted(before.items()):
            start, end = _hull(address, size)
            if hulls and start < hulls[-1][1]:
                hulls[-1][1] = max(hulls[-1][1], end)
            else:
                hulls.append([start, end])
        self._gaps.remove(0)
        self._insert_gap(0, hulls[0][0])
        self._top = hulls[-1][1]
        self._closed = [(left[1], right[0]) for left, right in pairwise(hulls) if left[1] < right[0]]
        for start, end in reversed(hulls):
            self._count += 1
            around = _Range(start, end, self._count)
            inside = [(address, size) for address, size in sorted(before.items()) if start <= address < end]
            self._live[around] = len(inside)
            position = start
            for address, size in [*inside, (end, 0)]:
                if address > position:
                    self._insert_hole(position, address - position, around)
                if size:
                    self._segments[address] = size, around
                position = address + size

    def predicted(self, size: int) -> int | None:
        """Return where the next segment would go."""
        address = LinuxPlacement.place(self, size)
        if address is not None:
            LinuxPlacement.release(self, address)
        return address

    def follow(self, address: int, size: int) -> None:
        """Put a segment at its recorded address; what the model prefers to it is used by something else."""
        if not self._live:
            self._seed({address: size})
            return
        start, end = _hull(address, size)
        self._open(start, end)
        while (preferred := self.predicted(size)) not in (address, None):
            assert preferred is not None
            if preferred in self._range_of_hole:
                around = self._range_of_hole.pop(preferred)
                hole = self._holes.remove(preferred)
                if preferred < address < preferred + hole:
                    self._insert_hole(address, preferred + hole - address, around)
                    break
            elif preferred < start:
                break
            else:
                gap = max(gap for gap in self._gaps.size_at if gap <= preferred)
                gap_end = gap + self._gaps.remove(gap)
                if gap < end <= gap_end:
                    self._insert_gap(gap, end - gap)
                    self._closed.append((end, gap_end))
                    break
                self._closed.append((gap, gap_end))
        self._occupy(address, size)

    def _open(self, start: int, end: int) -> None:
        """Free the interval below an address that was thought used and is not."""
        if end > self._top:
            self._closed.append((self._top, end))
            self._top = end
        for low, high in self._closed:
            if low <= start < high:
                self._closed.remove((low, high))
                self._insert_gap(low, min(end, high) - low)
                if end < high:
                    self._closed.append((end, high))
                return

    def _occupy(self, address: int, size: int) -> None:
        for hole, around in self._range_of_hole.items():
            hole_end = hole + self._holes.size_at[hole]
            if hole <= address and address + size <= hole_end:
                self._take_from_hole(hole, around, address, size)
                return
        start, end = _hull(address, size)
        for gap in [gap for gap, length in self._gaps.size_at.items() if gap < end and gap + length > start]:
            gap_end = gap + self._gaps.remove(gap)
            if gap < start:
                self._insert_gap(gap, start - gap)
            if end < gap_end:
                self._insert_gap(end, gap_end - end)
        self._closed = [
            part
            for low, high in self._closed
            for part in ((low, min(high, start)), (max(low, end), high))
            if part[0] < part[1]
        ]
        self._count += 1
        around = _Range(start, end, self._count)
        self._insert_hole(address, end - address, around)
        self._take_from_hole(address, around, address, size)

    def _take_from_hole(self, hole: int, around: _Range, address: int, size: int) -> None:
        hole_end = hole + self._holes.remove(hole)
        del self._range_of_hole[hole]
        if hole < address:
            self._insert_hole(hole, address - hole, around)
        if address + size < hole_end:
            self._insert_hole(address + size, hole_end - address - size, around)
        self._segments[address] = size, around
        self._live[around] = self._live.get(around, 0) + 1

    def place(self, size: int) -> int | None:
        """Return the address of a new segment."""
        address = super().place(size)
        if address is not None:
            around = self._segments[address][1]
            self._live[around] = self._live.get(around, 0) + 1
        return address

    def release(self, address: int) -> None:
        """Take a segment's addresses back; a range without a segment becomes a gap even if part of it was used."""
        around = self._segments[address][1]
        self._live[around] -= 1
        super().release(address)
        if self._live[around] == 0:
            del self._live[around]
            for hole in [hole for hole, other in self._range_of_hole.items() if other is around]:
                self._holes.remove(hole)
                del self._range_of_hole[hole]
            if around.start not in self._gaps.size_at and not self._in_gap(around.start):
                self._insert_gap(around.start, around.end - around.start)

    def _in_gap(self, address: int) -> bool:
        return any(start <= address < start + size for start, size in self._gaps.size_at.items())


class FollowedSpare(Followed):
    """A driver that reserves a range only in a gap larger than the range, as two recordings of 2023 show."""

    spare = RANGE


class FollowedFirstFit(FirstFit):
    """The placement under WSL and Windows with segments at recorded addresses."""

    def __init__(self, before: dict[int, int]) -> None:
        super().__init__(min(before, default=END - 1))
        self._used: dict[int, int] = {}
        """Intervals that something else uses: end by start."""
        for address, size in sorted(before.items()):
            self.follow(address, size)

    def predicted(self, size: int) -> int | None:
        """Return where the next segment would go."""
        address = self.place(size)
        if address is not None:
            self.release(address)
        return address

    def follow(self, address: int, size: int) -> None:
        """Put a segment at its recorded address; what the model prefers to it is used by something else."""
        first = min([*self._free.size_at, *self._segments, *self._used], default=END)
        if address < first:
            self._insert(address, first)
        for start, end in list(self._used.items()):
            if start <= address < end:
                self._used[start] = address
                self._insert(address, end)
        while (preferred := self.predicted(size)) not in (address, None):
            assert preferred is not None
            end = preferred + self._free.remove(preferred)
            self._used[preferred] = address if preferred < address < end else end
            if preferred < address < end:
                self._free.insert(address, end - address, address)
        start = max(start for start in self._free.size_at if start <= address)
        end = start + self._free.remove(start)
        if start < address:
            self._free.insert(start, address - start, start)
        if address + size < end:
            self._free.insert(address + size, end - address - size, address + size)
        self._segments[address] = size

    def _insert(self, start: int, end: int) -> None:
        if end in self._free.size_at:
            end += self._free.remove(end)
        self._free.insert(start, end - start, start)


FollowedPlacement = Followed | FollowedFirstFit
