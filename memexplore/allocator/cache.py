"""Release cached memory to the device: garbage collection, oversize blocks, whole pools (docs/allocator.md 8, 10)."""

from __future__ import annotations

from memexplore.allocator import expandable
from memexplore.allocator.blocks import Block, FreeSet, Pool
from memexplore.allocator.segments import Segments
from memexplore.tape import Action
from memexplore.tape.allocator_settings import UNLIMITED


def collect_garbage(segments: Segments) -> None:
    """Release unsplit free blocks of the large pool, those of at least mean age, until the target is met."""
    assert segments.limit is not None
    target = segments.reserved - int(segments.settings.garbage_collection_threshold * segments.limit)
    if target <= 0:
        return
    now = segments.large.searches
    blocks = [block for block in segments.large.free_blocks() if block.previous is None and block.next is None]
    total_age = sum(now - block.inserted_at for block in blocks)
    count = len(blocks)
    released = 0
    progress = True
    while released < target and progress and count:
        min_age = total_age / count
        progress = False
        for block in blocks:
            age = now - block.inserted_at
            if block.free and block.expandable is None and age >= min_age:
                progress = True
                released += block.size
                total_age -= age
                count -= 1
                _free_segment(segments, block)


def release_oversize(segments: Segments, free_set: FreeSet, size: int) -> bool:
    """Release just enough blocks of `max_split_size` or more for a request; return whether there were enough.

    PyTorch calls it `release_available_cached_blocks`.
    """
    max_split_size = segments.settings.max_split_size
    if max_split_size == UNLIMITED:
        return False
    needed = max(size, max_split_size)
    block = next(free_set.at_least(needed), None)
    if block is not None and block.expandable is None:
        _free_segment(segments, block)
        return True
    released = 0
    for other in reversed([other for other in free_set.at_least(max_split_size) if other.size < needed]):
        if released >= needed:
            break
        if other.expandable is None:
            released += other.size
            _free_segment(segments, other)
    return released >= needed


def release_pool(segments: Segments, pool: Pool) -> None:
    """Release every segment of a pool without a live block: whole segments first, then pages of expandable ones."""
    blocks = pool.free_blocks()
    for block in blocks:
        if block.expandable is None:
            release_block(segments, block)
    for block in blocks:
        if block.expandable is not None:
            release_block(segments, block)


def release_unused_private_pools(segments: Segments) -> None:
    """Release the private pools with a use count of 0, and remove those without segments."""
    for identity, private in list(segments.private.items()):
        if private.use_count == 0:
            release_pool(segments, private.small)
            release_pool(segments, private.large)
            if private.segments == 0:
                del segments.private[identity]


def release_block(segments: Segments, block: Block) -> None:
    """Release what can be released of a free block: the whole segment, or the whole pages inside the block."""
    if block.expandable is not None:
        expandable.unmap(segments, block)
    elif block.previous is None and block.next is None:
        _free_segment(segments, block)


def _free_segment(segments: Segments, block: Block) -> None:
    block.free_set.remove(block)
    segments.device_frees += 1
    if block.free_set.pool.private is not None:
        block.free_set.pool.private.segments -= 1
    segments.update_reserved(Action.SEGMENT_FREE, block.address, block.size, block.free_set)
