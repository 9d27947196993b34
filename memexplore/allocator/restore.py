"""Restore the state that the allocator had at the first event of a tape that starts late, from its initial rows."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterator
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from memexplore.allocator import expandable
from memexplore.allocator.actions import GROWTH
from memexplore.allocator.blocks import ADDRESS, Block, ExpandableSegment, FreeSet, Pool
from memexplore.allocator.segments import Segments
from memexplore.allocator.sizes import block_sizes
from memexplore.tape import Action, Tape
from memexplore.tape.allocator_settings import SMALL, SMALL_SEGMENT

_FREES = (Action.FREE_REQUESTED, Action.FREE_COMPLETED)


class _Region(NamedTuple):
    """A segment, or a mapped run of an expandable segment."""

    address: int
    end: int
    stream: int
    expandable: bool


class _Taken(NamedTuple):
    """A block that is not free, sizes in bytes."""

    address: int
    size: int
    requested: int


def restore(tape: Tape, segments: Segments) -> tuple[int, dict[int, Block]]:
    """Put the segments and blocks of a tape's initial rows into empty segments of an allocator.

    The initial rows are the segments (segment_alloc; segment_map for each mapped run of an expandable segment), then at
    least one preexisting row, then the frees of the empty ones among them. Returns their number and the blocks by
    address; 0 and no blocks if a preexisting block lies outside every segment.
    """
    count = _count_of_initial_rows(tape)
    if not count:
        return 0, {}
    initial = tape[:count]
    columns = (initial.address.tolist(), block_sizes(initial).tolist(), initial.size.tolist())
    taken = sorted(_Taken(*fields) for fields in zip(*columns, strict=True) if fields[1])
    regions = _regions(initial)
    if not _each_in_one_region(taken, regions):
        return 0, {}
    on_event, segments.on_event = segments.on_event, None
    blocks: dict[int, Block] = {}
    mapped: dict[FreeSet, list[Block]] = {}
    for region, inside in _with_blocks(regions, taken):
        free_set = segments.free_set(_pool(segments, region, inside), region.stream)
        pieces = _pieces(segments, free_set, region, inside)
        for block in pieces:
            if block.requested:
                blocks[block.address] = segments.live[block.address] = block
            else:
                free_set.insert(block)
        if region.expandable:
            mapped.setdefault(free_set, []).extend(pieces)
        else:
            _link(pieces)
        action = Action.SEGMENT_MAP if region.expandable else Action.SEGMENT_ALLOC
        segments.update_reserved(action, region.address, region.end - region.address, free_set)
    for free_set, pieces in mapped.items():
        _join_expandable(segments, free_set, pieces)
    for address in initial.address[(initial.action == Action.FREE_REQUESTED) & (initial.size > 0)].tolist():
        del segments.live[address]
        segments.pending[blocks[address]] = None
        blocks[address].pending_events = 1
    segments.on_event = on_event
    return count, blocks


def _count_of_initial_rows(tape: Tape) -> int:
    """Return the number of rows that describe the state before the first event; 0 in a tape that starts empty."""
    preexisting = np.flatnonzero(tape.action == Action.PREEXISTING)
    if not len(preexisting):
        return 0
    count = int(preexisting[-1]) + 1
    while count < len(tape) and tape.size[count] == 0 and tape.action[count] in _FREES:
        count += 1
    return count


def _with_blocks(regions: list[_Region], taken: list[_Taken]) -> Iterator[tuple[_Region, list[_Taken]]]:
    """Yield each region with the blocks inside it; both lists are sorted by address."""
    starts = [block.address for block in taken]
    for region in regions:
        yield region, taken[bisect_left(starts, region.address) : bisect_left(starts, region.end)]


def _pool(segments: Segments, region: _Region, inside: list[_Taken]) -> Pool:
    """Return the pool of a region: by its size, and in an expandable segment by its blocks."""
    size = region.end - region.address
    small = size == SMALL_SEGMENT
    if region.expandable:
        small = any(block.size <= SMALL for block in inside) or (
            not inside and size % segments.settings.large_segment_size != 0
        )
    return segments.small if small else segments.large


def _regions(initial: Tape) -> list[_Region]:
    """Return the regions by address."""
    columns = (initial.action, initial.address, initial.size, initial.stream)
    return sorted(
        _Region(address, address + size, stream, action == Action.SEGMENT_MAP)
        for action, address, size, stream in zip(*(column.tolist() for column in columns), strict=True)
        if action in GROWTH and size > 0
    )


def _each_in_one_region(taken: list[_Taken], regions: list[_Region]) -> bool:
    """Return whether each block lies inside one region, and neither blocks nor regions overlap."""
    at = 0
    for block in taken:
        while at < len(regions) and regions[at].end <= block.address:
            at += 1
        if at == len(regions) or block.address < regions[at].address or block.address + block.size > regions[at].end:
            return False
    blocks_apart = all(left.address + left.size <= right.address for left, right in pairwise(taken))
    return blocks_apart and all(left.end <= right.address for left, right in pairwise(regions))


def _pieces(segments: Segments, free_set: FreeSet, region: _Region, inside: list[_Taken]) -> list[Block]:
    """Return the blocks of a region by address; a free one has 0 requested bytes."""
    first = Block(region.address, 0, free_set, segments.rank(region.address), None)
    pieces = []
    position = region.address
    for taken in [*inside, _Taken(region.end, 0, 0)]:
        for piece in (_Taken(position, taken.address - position, 0), taken):
            if piece.size:
                block = Block(piece.address, piece.size, free_set, segments.rank(piece.address, first), None)
                block.requested = piece.requested
                pieces.append(block)
        position = taken.address + taken.size
    return pieces


def _link(blocks: list[Block]) -> None:
    for left, right in pairwise(blocks):
        left.next, right.previous = right, left


def _join_expandable(segments: Segments, free_set: FreeSet, mapped: list[Block]) -> None:
    """Join the mapped blocks of one pool and stream to one expandable segment, unmapped ranges between and behind."""
    page = expandable.page_size(segments, free_set)
    base = mapped[0].address
    end_of_mapped = mapped[-1].address + mapped[-1].size
    length = expandable.range_size(segments, page, end_of_mapped - base + page)
    segment = ExpandableSegment(base, page, length)
    blocks: list[Block] = []
    for block, following in zip(mapped, [*(block.address for block in mapped[1:]), base + length], strict=True):
        block.expandable = segment
        blocks.append(block)
        end = block.address + block.size
        if end < following:
            gap = Block(end, following - end, free_set, segments.rank(end, block), segment)
            gap.mapped = False
            blocks.append(gap)
            insort(free_set.unmapped, gap, key=ADDRESS)
    _link(blocks)
