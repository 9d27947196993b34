"""Giving cached memory back to the device: garbage collection, oversize blocks, everything (ALLOCATOR.md 8 and 10)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from memexplore.allocator import expandable
from memexplore.allocator.blocks import Block, FreeSet, Pool
from memexplore.allocator.settings import UNLIMITED
from memexplore.tape import Action

if TYPE_CHECKING:
    from memexplore.allocator.placement import Placement


def collect_garbage(placement: Placement) -> None:
    """Release whole free blocks of the large pool that were not used for long, until enough is given back."""
    assert placement.limit is not None
    target = placement.reserved - int(placement.settings.garbage_collection_threshold * placement.limit)
    if target <= 0:
        return
    now = placement.large.searches
    blocks = [block for block in _in_order(placement.large) if block.previous is None and block.next is None]
    total_age = sum(now - block.age for block in blocks)
    count = len(blocks)
    released = 0
    found = True
    while released < target and found and count:
        least_age = total_age / count
        found = False
        for block in blocks:
            age = now - block.age
            if block.free and block.range is None and age >= least_age:
                found = True
                released += block.size
                total_age -= age
                count -= 1
                _release(placement, block)


def release_oversize(placement: Placement, home: FreeSet, size: int) -> bool:
    """Release just enough blocks that are too large to be split; False where there are not enough of them."""
    most = placement.settings.max_split_size
    if most == UNLIMITED:
        return False
    wanted = max(size, most)
    block = next(home.from_size(wanted), None)
    if block is not None and block.range is None:
        _release(placement, block)
        return True
    released = 0
    for other in reversed([other for other in home.from_size(most) if other.size < wanted]):
        if released >= wanted:
            break
        if other.range is None:
            released += other.size
            _release(placement, other)
    return released >= wanted


def release_everything(placement: Placement) -> None:
    """Release every segment without a live block, after waiting for all streams."""
    if not placement.captures:
        placement.synchronize()
        _release_pool(placement, placement.large)
        _release_pool(placement, placement.small)
    for identity, private in list(placement.private.items()):
        if private.users == 0:
            _release_pool(placement, private.small)
            _release_pool(placement, private.large)
            if private.segments == 0:
                del placement.private[identity]


def _in_order(pool: Pool) -> list[Block]:
    return [block for stream in sorted(pool.streams) for block in pool.streams[stream].from_size(0)]


def _release_pool(placement: Placement, pool: Pool) -> None:
    blocks = _in_order(pool)
    for block in blocks:
        if block.range is None:
            release_block(placement, block)
    for block in blocks:
        if block.range is not None:
            release_block(placement, block)


def release_block(placement: Placement, block: Block) -> None:
    """Give a free block back as far as the device takes it: a whole segment, or the whole pages inside the block."""
    if block.range is not None:
        expandable.unmap(placement, block)
    elif block.previous is None and block.next is None:
        _release(placement, block)


def _release(placement: Placement, block: Block) -> None:
    block.home.remove(block)
    placement.device_frees += 1
    if block.home.pool.private is not None:
        block.home.pool.private.segments -= 1
    placement.reserve(Action.SEGMENT_FREE, block.address, block.size, block.home)
