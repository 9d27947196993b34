"""Map and unmap the memory of expandable segments page by page (docs/allocator.md section 12)."""

from __future__ import annotations

from bisect import bisect_left, insort

from memexplore.allocator.blocks import ADDRESS, Block, ExpandableSegment, FreeSet
from memexplore.allocator.segments import Segments
from memexplore.tape import Action
from memexplore.tape.allocator_settings import SMALL_SEGMENT


def effective_size(block: Block) -> int:
    """Return the bytes that a free block can grow to: its own and those of the unmapped range behind it."""
    after = block.next
    return block.size + (after.size if after is not None and not after.mapped else 0)


def map_block(segments: Segments, free_set: FreeSet, size: int) -> Block | None:
    """Map memory for a block of at least `size` bytes and return it, removed from its free set.

    Returns None if the device has no memory left; what was mapped until then stays mapped and free.
    """
    block = _first_candidate(segments, free_set, size)
    if not block.mapped and not _map(segments, block, min(block.size, size)):
        return None
    while block.size < size:
        after = block.next
        assert after is not None
        if not _map(segments, after, min(size - block.size, after.size)):
            return None
        block = after
    free_set.remove(block)
    return block


def page_size(segments: Segments, free_set: FreeSet) -> int:
    """Return the bytes that a pool's expandable segments map at once."""
    return SMALL_SEGMENT if free_set.pool.kind == "small" else segments.settings.large_segment_size


def range_size(segments: Segments, page: int, needed: int) -> int:
    """Return the bytes of addresses of an expandable segment: 9/8 of the device's memory, at least `needed`."""
    return -(-max(segments.total + segments.total // 8, needed) // page) * page


def _first_candidate(segments: Segments, free_set: FreeSet, size: int) -> Block:
    """Return the first block of the lowest run of free and unmapped blocks of `size` bytes, else a new range."""
    for unmapped in free_set.unmapped:
        before = unmapped.previous
        first = before if before is not None and before.available else unmapped
        run_size = 0
        block: Block | None = first
        while block is not None and run_size < size and block.available:
            run_size += block.size
            block = block.next
        if run_size >= size:
            return first
    page = page_size(segments, free_set)
    length = range_size(segments, page, size)
    base = segments.new_range(length, free_set.stream)
    block = Block(base, length, free_set, segments.rank(base), ExpandableSegment(base, page, length))
    block.mapped = False
    insort(free_set.unmapped, block, key=ADDRESS)
    return block


def _map(segments: Segments, block: Block, size: int) -> bool:
    """Map the first `size` bytes of an unmapped block, in whole pages, and merge them with free neighbours.

    Returns whether the device had the memory.
    """
    free_set, expandable = block.free_set, block.expandable
    assert expandable is not None
    offset = block.address - expandable.base
    size = -(-(offset + size) // expandable.page) * expandable.page - offset
    if segments.reserved + size > segments.capacity:
        return False
    del free_set.unmapped[bisect_left(free_set.unmapped, block.address, key=ADDRESS)]
    block.mapped = True
    address = block.address
    if size < block.size:
        rest_address = address + size
        rest = Block(rest_address, block.size - size, free_set, segments.rank(rest_address, block), expandable)
        rest.mapped = False
        _insert_after(block, rest)
        block.size = size
        insort(free_set.unmapped, rest, key=ADDRESS)
    segments.merge_free(block)
    segments.device_allocs += 1
    segments.update_reserved(Action.SEGMENT_MAP, address, size, free_set)
    return True


def unmap(segments: Segments, block: Block) -> None:
    """Unmap the whole pages inside a free block; fractions of pages at its ends stay mapped and free."""
    free_set, expandable = block.free_set, block.expandable
    assert expandable is not None
    page, base = expandable.page, expandable.base
    start = -(-(block.address - base) // page) * page + base
    end = (block.address + block.size - base) // page * page + base
    if start >= end:
        return
    free_set.remove(block)
    if block.address < start:
        before = Block(block.address, start - block.address, free_set, segments.rank(block.address, block), expandable)
        if block.previous is not None:
            _insert_after(block.previous, before)
        before.next, block.previous = block, before
        free_set.insert(before)
    if end < block.address + block.size:
        after = Block(end, block.address + block.size - end, free_set, segments.rank(end, block), expandable)
        _insert_after(block, after)
        free_set.insert(after)
    segments.set_address(block, start)
    block.size, block.mapped = end - start, False
    for other in (block.previous, block.next):
        if other is not None and not other.mapped:
            free_set.unmapped.remove(other)
            _absorb(segments, block, other)
    insort(free_set.unmapped, block, key=ADDRESS)
    segments.device_frees += 1
    if free_set.pool.private is not None:
        free_set.pool.private.segments -= 1
    segments.update_reserved(Action.SEGMENT_UNMAP, start, end - start, free_set)
    if block.previous is None and block.next is None:
        free_set.unmapped.remove(block)


def _insert_after(block: Block, new: Block) -> None:
    new.previous, new.next = block, block.next
    if block.next is not None:
        block.next.previous = new
    block.next = new


def _absorb(segments: Segments, block: Block, other: Block) -> None:
    """Extend a block over its neighbour `other`."""
    if block.previous is other:
        segments.set_address(block, other.address)
        block.previous = other.previous
        if block.previous is not None:
            block.previous.next = block
    else:
        block.next = other.next
        if block.next is not None:
            block.next.previous = block
    block.size += other.size
