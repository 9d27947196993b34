"""Choose addresses for new segments as the GPU driver of an operating system does (docs/allocator.md 19).

Up to torch 2.11 the address decides between free blocks of equal size, so the placement can change peaks.
"""

from __future__ import annotations

import heapq
from bisect import bisect_left, insort
from typing import NamedTuple, Protocol

from memexplore.tape import Os

RANGE = 32 << 20
"""Bytes: on Linux the driver reserves addresses in multiples of this size, at multiples of it."""
END = 0x7F00_0000_0000
"""First address beyond those that a placement gives out."""
_LINUX_ABOVE = 1 << 44
"""Segments of cudaMalloc lie above this address on Linux and below it under WSL and Windows."""
_FIRST_ADDRESS = {Os.WSL: 0x5_0200_0000, Os.WINDOWS: 0x7_0000_0000}


class Placement(Protocol):
    """Where a driver puts segments; addresses and sizes in bytes, sizes in multiples of 2 MiB."""

    def place(self, size: int) -> int | None:
        """Return the address of a new segment, None if no free interval of addresses is large enough."""

    def release(self, address: int) -> None:
        """Take a segment's addresses back; an address that `place` did not return has no effect."""


class LinuxPlacement:
    """The driver on Linux: ranges of `RANGE` bytes or a multiple, reserved downwards, segments upwards inside them.

    A segment goes into the range that was reserved last among those with a large enough hole, at the lowest such hole.
    Otherwise a new range is reserved at the end of the highest large enough gap between ranges, as mmap does. A range
    without a segment becomes a gap. Fitted on the recordings in `tests/data`; `python -m tests.fidelity.placement`
    counts the addresses that it predicts.

    >>> placement = LinuxPlacement()
    >>> addresses = [placement.place(size << 20) for size in (20, 20, 2, 100)]
    >>> [(END - address) >> 20 for address in addresses]
    [32, 64, 44, 192]
    """

    spare = 0
    """Bytes that a gap must have beyond those of the range."""

    def __init__(self) -> None:
        self._gaps = _FreeIntervals()
        self._gaps.insert(0, END, -END)
        self._holes = _FreeIntervals()
        self._range_of_hole: dict[int, _Range] = {}
        self._segments: dict[int, tuple[int, _Range]] = {}
        self._count = 0

    def place(self, size: int) -> int | None:
        """Return the address of a new segment, None if no gap is large enough."""
        address = self._holes.first(size)
        if address is None:
            address = self._reserve(size)
        if address is None:
            return None
        hole = self._holes.remove(address)
        around = self._range_of_hole.pop(address)
        if hole > size:
            self._insert_hole(address + size, hole - size, around)
        self._segments[address] = size, around
        return address

    def release(self, address: int) -> None:
        """Take a segment's addresses back."""
        if address not in self._segments:
            return
        size, around = self._segments.pop(address)
        before = self._holes.start_of_end(address) if address > around.start else None
        if before is not None:
            address, size = before, size + self._holes.remove(before)
            del self._range_of_hole[before]
        after = address + size
        if after < around.end and after in self._range_of_hole:
            size += self._holes.remove(after)
            del self._range_of_hole[after]
        if size == around.end - around.start:
            self._insert_gap(address, size)
        else:
            self._insert_hole(address, size, around)

    def _reserve(self, size: int) -> int | None:
        """Reserve a range at the end of the highest gap and return its start."""
        length = -(-size // RANGE) * RANGE
        gap = self._gaps.first(length + self.spare)
        if gap is None:
            return None
        free = self._gaps.remove(gap) - length
        if free:
            self._insert_gap(gap, free)
        self._count += 1
        self._insert_hole(gap + free, length, _Range(gap + free, gap + free + length, self._count))
        return gap + free

    def _insert_hole(self, start: int, size: int, around: _Range) -> None:
        self._holes.insert(start, size, -around.number)
        self._range_of_hole[start] = around

    def _insert_gap(self, start: int, size: int) -> None:
        before = self._gaps.start_of_end(start)
        if before is not None:
            start, size = before, size + self._gaps.remove(before)
        if start + size in self._gaps.size_at:
            size += self._gaps.remove(start + size)
        self._gaps.insert(start, size, -(start + size))


class FirstFit:
    """Segments one behind the other, each at the lowest free addresses: the driver under WSL and Windows.

    >>> placement = FirstFit(4 << 20)
    >>> [placement.place(size << 20) >> 20 for size in (20, 2, 2)]
    [4, 24, 26]
    >>> placement.release(24 << 20)
    >>> placement.place(2 << 20) >> 20
    24
    """

    def __init__(self, first: int) -> None:
        self._free = _FreeIntervals()
        self._free.insert(first, END - first, first)
        self._segments: dict[int, int] = {}

    def place(self, size: int) -> int | None:
        """Return the address of a new segment, None if no free interval is large enough."""
        address = self._free.first(size)
        if address is None:
            return None
        free = self._free.remove(address)
        if free > size:
            self._free.insert(address + size, free - size, address + size)
        self._segments[address] = size
        return address

    def release(self, address: int) -> None:
        """Take a segment's addresses back."""
        size = self._segments.pop(address, 0)
        if not size:
            return
        before = self._free.start_of_end(address)
        if before is not None:
            address, size = before, size + self._free.remove(before)
        if address + size in self._free.size_at:
            size += self._free.remove(address + size)
        self._free.insert(address, size, address)


class Downwards:
    """Segments one below the other; freed addresses are not used again."""

    def __init__(self) -> None:
        self._lowest = END

    def place(self, size: int) -> int | None:
        """Return the address of a new segment, None if all addresses are used up."""
        if size > self._lowest:
            return None
        self._lowest -= size
        return self._lowest

    def release(self, address: int) -> None:
        """Keep the addresses of a segment out of use."""


def placement_on(system: Os) -> Placement:
    """Return the placement of the driver on an operating system, on an empty device.

    >>> placement_on(Os.WSL).place(2 << 20) == 0x502000000
    True
    """
    return LinuxPlacement() if system is Os.LINUX else FirstFit(_FIRST_ADDRESS[system])


def system_of(text: str) -> Os:
    """Return the operating system of a name.

    >>> system_of("wsl").name
    'WSL'

    Raises ValueError for another name.
    """
    try:
        return Os(text.lower())
    except ValueError:
        raise ValueError(f"{text!r} is not an operating system of a GPU driver; write {', '.join(Os)}") from None


def system_of_address(address: int) -> Os:
    """Return the operating system of the lowest segment that cudaMalloc gave.

    >>> [system_of_address(address).value for address in (0x7F2062000000, 0x502000000, 0x704400000)]
    ['linux', 'wsl', 'windows']
    """
    if address > _LINUX_ABOVE:
        return Os.LINUX
    return Os.WINDOWS if address >= _FIRST_ADDRESS[Os.WINDOWS] else Os.WSL


class _Range(NamedTuple):
    """Addresses from `start` to `end` that the driver reserved at once; `number` counts the ranges."""

    start: int
    end: int
    number: int


class _FreeIntervals:
    """Disjoint intervals of addresses; of the large enough ones that of the lowest rank, then address, is first."""

    def __init__(self) -> None:
        self.size_at: dict[int, int] = {}
        """Size of each interval by its start."""
        self._start_of_end: dict[int, int] = {}
        # Intervals that were removed stay in the heaps, and sizes without interval in the list, until a search meets
        # them.
        self._heaps: dict[int, list[tuple[int, int]]] = {}
        self._sizes: list[int] = []

    def insert(self, start: int, size: int, rank: int) -> None:
        """Add an interval."""
        self.size_at[start] = size
        self._start_of_end[start + size] = start
        if size not in self._heaps:
            self._heaps[size] = []
            insort(self._sizes, size)
        heapq.heappush(self._heaps[size], (rank, start))

    def remove(self, start: int) -> int:
        """Remove the interval with this start and return its size."""
        size = self.size_at.pop(start)
        del self._start_of_end[start + size]
        heap = self._heaps[size]
        if heap and heap[0][1] == start:
            heapq.heappop(heap)
        return size

    def start_of_end(self, end: int) -> int | None:
        """Return the start of the interval that ends at an address."""
        return self._start_of_end.get(end)

    def first(self, size: int) -> int | None:
        """Return the start of the first interval of at least `size` bytes."""
        best: tuple[int, int] | None = None
        at = bisect_left(self._sizes, size)
        while at < len(self._sizes):
            heap = self._heaps[self._sizes[at]]
            while heap and self.size_at.get(heap[0][1]) != self._sizes[at]:
                heapq.heappop(heap)
            if heap:
                best = heap[0] if best is None else min(best, heap[0])
                at += 1
            else:
                del self._heaps[self._sizes.pop(at)]
        return None if best is None else best[1]
