"""Expandable segments: memory mapped behind a range of addresses page by page (ALLOCATOR.md section 12)."""

from __future__ import annotations

from bisect import bisect_left, insort
from typing import TYPE_CHECKING

from memexplore.allocator.blocks import ADDRESS, Block, FreeSet, Range
from memexplore.allocator.settings import SMALL_SEGMENT
from memexplore.tape import Action

if TYPE_CHECKING:
    from memexplore.allocator.placement import Placement


def reach(block: Block) -> int:
    """The bytes that a free block could grow to: its own and those of the unmapped range behind it."""
    after = block.next
    return block.size + (after.size if after is not None and not after.mapped else 0)


def grow(placement: Placement, home: FreeSet, size: int) -> Block | None:
    """A block of at least `size` bytes, taken out of its free set, with memory behind all of it; None without memory.

    What was mapped before the device ran out stays mapped and free.
    """
    block = _candidate(placement, home, size)
    if not block.mapped and not _map(placement, block, min(block.size, size)):
        return None
    while block.size < size:
        after = block.next
        assert after is not None
        if not _map(placement, after, min(size - block.size, after.size)):
            return None
        block = after
    home.remove(block)
    return block


def _candidate(placement: Placement, home: FreeSet, size: int) -> Block:
    """The lowest run of free and unmapped blocks with room, else a new range of addresses."""
    for unmapped in home.unmapped:
        before = unmapped.previous
        first = before if before is not None and before.idle else unmapped
        room, block = 0, first
        while block is not None and room < size and block.idle:
            room += block.size
            block = block.next  # type: ignore[assignment]
        if room >= size:
            return first
    page = SMALL_SEGMENT if home.pool.kind == "small" else placement.settings.large_segment_size
    # A range holds 9/8 of the device's memory, so that one is nearly always enough.
    pages = -(-max(placement.total + placement.total // 8, size) // page)
    base = placement.new_address(pages * page, home.stream)
    block = Block(base, pages * page, home, placement.rank(base), Range(base, page, pages * page))
    block.mapped = False
    insort(home.unmapped, block, key=ADDRESS)
    return block


def _map(placement: Placement, block: Block, size: int) -> bool:
    """Put memory behind the first `size` bytes of an unmapped block, in whole pages, and merge it with free ones."""
    home, segment = block.home, block.range
    assert segment is not None
    size = -(-(block.address - segment.base + size) // segment.page) * segment.page - (block.address - segment.base)
    if placement.reserved + size > placement.capacity:
        return False
    del home.unmapped[bisect_left(home.unmapped, block.address, key=ADDRESS)]
    block.mapped = True
    address = block.address
    if size < block.size:
        rest_address = address + size
        rest = Block(rest_address, block.size - size, home, placement.rank(rest_address, block), segment)
        rest.mapped = False
        _insert_after(block, rest)
        block.size = size
        insort(home.unmapped, rest, key=ADDRESS)
    placement.settle(block)
    placement.device_allocs += 1
    placement.reserve(Action.SEGMENT_MAP, address, size, home)
    return True


def unmap(placement: Placement, block: Block) -> None:
    """Take the memory back from the whole pages inside a free block; fractions of pages at its ends stay free."""
    home, segment = block.home, block.range
    assert segment is not None
    start = -(-(block.address - segment.base) // segment.page) * segment.page + segment.base
    end = (block.address + block.size - segment.base) // segment.page * segment.page + segment.base
    if start >= end:
        return
    home.remove(block)
    if block.address < start:
        before = Block(block.address, start - block.address, home, placement.rank(block.address, block), segment)
        if block.previous is not None:
            _insert_after(block.previous, before)
        before.next, block.previous = block, before
        home.insert(before)
    if end < block.address + block.size:
        after = Block(end, block.address + block.size - end, home, placement.rank(end, block), segment)
        _insert_after(block, after)
        home.insert(after)
    placement.move(block, start)
    block.size, block.mapped = end - start, False
    for other in (block.previous, block.next):
        if other is not None and not other.mapped:
            home.unmapped.remove(other)
            _absorb(placement, block, other)
    insort(home.unmapped, block, key=ADDRESS)
    placement.device_frees += 1
    if home.pool.private is not None:
        home.pool.private.segments -= 1
    placement.reserve(Action.SEGMENT_UNMAP, start, end - start, home)
    if block.previous is None and block.next is None:
        home.unmapped.remove(block)


def _insert_after(block: Block, new: Block) -> None:
    new.previous, new.next = block, block.next
    if block.next is not None:
        block.next.previous = new
    block.next = new


def _absorb(placement: Placement, block: Block, other: Block) -> None:
    """Let a block take the place of its neighbour too."""
    if block.previous is other:
        placement.move(block, other.address)
        block.previous = other.previous
        if block.previous is not None:
            block.previous.next = block
    else:
        block.next = other.next
        if block.next is not None:
            block.next.previous = block
    block.size += other.size
