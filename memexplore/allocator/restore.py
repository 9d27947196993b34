"""The allocator's state at the first event of a tape that starts late."""

from __future__ import annotations

from bisect import insort
from itertools import pairwise

import numpy as np

from memexplore.allocator.blocks import ADDRESS, Block, FreeSet, Range
from memexplore.allocator.placement import Placement
from memexplore.allocator.settings import SMALL, SMALL_SEGMENT
from memexplore.allocator.sizes import block_sizes
from memexplore.tape import Action, Tape


def restore(tape: Tape, placement: Placement) -> tuple[int, dict[int, Block]]:
    """Put the segments and blocks of a tape's first rows into an allocator.

    Such a tape begins with the segments that were there (segment_alloc; segment_map for each mapped run of an
    expandable segment), then preexisting rows, at least one, then the frees of the empty ones among them. The number
    of these rows and the blocks by address come back; 0 and none where a preexisting block lies in no segment.
    """
    before = np.flatnonzero(tape.action == Action.PREEXISTING)
    if not len(before):
        return 0, {}
    begin = int(before[-1]) + 1
    while begin < len(tape) and tape.size[begin] == 0 and tape.action[begin] in _FREES:
        begin += 1
    first = tape[:begin]
    sizes = block_sizes(first)
    taken = [
        (address, size, requested)
        for address, size, requested in zip(first.address.tolist(), sizes.tolist(), first.size.tolist(), strict=True)
        if size
    ]
    taken.sort()
    regions = _regions(first)
    if not _all_inside(taken, regions):
        return 0, {}
    event, placement.on_event = placement.on_event, None
    blocks: dict[int, Block] = {}
    at = 0
    chains: dict[FreeSet, list[Block]] = {}
    for address, end, stream, expandable in regions:
        inside = []
        while at < len(taken) and taken[at][0] < end:
            inside.append(taken[at])
            at += 1
        small = end - address == SMALL_SEGMENT
        if expandable:
            small = any(size <= SMALL for _, size, _ in inside) or (
                not inside and (end - address) % placement.settings.large_segment_size != 0
            )
        home = placement.home(placement.small if small else placement.large, stream)
        pieces = _pieces(placement, home, address, end, inside)
        for block, requested in pieces:
            block.requested = requested
            if requested:
                blocks[block.address] = placement.live[block.address] = block
            else:
                home.insert(block)
        run = [block for block, _ in pieces]
        if expandable:
            chains.setdefault(home, []).extend(run)
        else:
            _link(run)
        placement.reserve(Action.SEGMENT_MAP if expandable else Action.SEGMENT_ALLOC, address, end - address, home)
    for home, chain in chains.items():
        _expandable(placement, home, chain)
    for address in first.address[(first.action == Action.FREE_REQUESTED) & (first.size > 0)].tolist():
        del placement.live[address]
        placement.pending[blocks[address]] = None
        blocks[address].waiting = 1
    placement.on_event = event
    return begin, blocks


_FREES = (Action.FREE_REQUESTED, Action.FREE_COMPLETED)


def _regions(first: Tape) -> list[tuple[int, int, int, bool]]:
    """Address, end, stream and whether it is expandable of each piece of memory, by address."""
    rows = zip(first.action.tolist(), first.address.tolist(), first.size.tolist(), first.stream.tolist(), strict=True)
    return sorted(
        (address, address + size, stream, action == Action.SEGMENT_MAP)
        for action, address, size, stream in rows
        if action in (Action.SEGMENT_ALLOC, Action.SEGMENT_MAP)
    )


def _all_inside(taken: list[tuple[int, int, int]], regions: list[tuple[int, int, int, bool]]) -> bool:
    at = 0
    for address, size, _ in taken:
        while at < len(regions) and regions[at][1] <= address:
            at += 1
        if at == len(regions) or address < regions[at][0] or address + size > regions[at][1]:
            return False
    apart = all(left[0] + left[1] <= right[0] for left, right in pairwise(taken))
    return apart and all(left[1] <= right[0] for left, right in pairwise(regions))


def _pieces(
    placement: Placement, home: FreeSet, start: int, end: int, inside: list[tuple[int, int, int]]
) -> list[tuple[Block, int]]:
    """The blocks of one region, each with its requested bytes, 0 where it is free."""
    first = Block(start, 0, home, placement.rank(start), None)
    pieces = []
    address = start
    for taken, size, requested in [*inside, (end, 0, 0)]:
        for at, length, asked in ((address, taken - address, 0), (taken, size, requested)):
            if length:
                pieces.append((Block(at, length, home, placement.rank(at, first), None), asked))
        address = taken + size
    return pieces


def _link(chain: list[Block]) -> None:
    for left, right in pairwise(chain):
        left.next, right.previous = right, left


def _expandable(placement: Placement, home: FreeSet, chain: list[Block]) -> None:
    """Join the mapped runs of one pool and stream into one expandable segment, unmapped ranges between and behind."""
    page = SMALL_SEGMENT if home.pool.kind == "small" else placement.settings.large_segment_size
    base = chain[0].address
    last = chain[-1].address + chain[-1].size
    pages = -(-max(placement.total + placement.total // 8, last - base + page) // page)
    segment = Range(base, page, pages * page)
    whole: list[Block] = []
    for block, after in zip(chain, [*(block.address for block in chain[1:]), base + segment.size], strict=True):
        block.range = segment
        whole.append(block)
        end = block.address + block.size
        if end < after:
            gap = Block(end, after - end, home, placement.rank(end, block), segment)
            gap.mapped = False
            whole.append(gap)
            insort(home.unmapped, gap, key=ADDRESS)
    _link(whole)
