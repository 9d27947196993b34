"""The blocks that a placed tape handed out."""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort
from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

from memexplore.allocator.blocks import Block
from memexplore.allocator.settings import BLOCK, SMALL, SMALL_SEGMENT, Settings
from memexplore.tape import Action, Tape


def rounded_sizes(sizes: NDArray[np.int64], settings: Settings) -> NDArray[np.int64]:
    """`Settings.round_size` of a whole column; 0 stays 0, because a request of nothing never reaches the allocator."""
    if not any(settings.roundup_power2_divisions):
        return (sizes + (BLOCK - 1)) & -BLOCK
    distinct, where = np.unique(sizes, return_inverse=True)
    rounded = [settings.round_size(size) if size > 0 else 0 for size in distinct.tolist()]
    return np.array(rounded, dtype=np.int64)[where]


def block_sizes(tape: Tape) -> NDArray[np.int64]:
    """Bytes of the block that each alloc or preexisting row handed out, 0 on every other row.

    A block is the rounded request; in the large pool also what is too little to be split off: up to 1 MiB that lies
    between it and the next taken block or the end of its segment (ALLOCATOR.md section 6). The tape must be placed;
    on a CPU a block is the request itself.

    >>> from memexplore.tape import Meta, Source
    >>> rows = {"action": [Action.SEGMENT_ALLOC, Action.ALLOC], "address": [0, 0], "size": [12 << 20, (11 << 20) + 5]}
    >>> block_sizes(Tape.from_columns(rows, meta=Meta(Source.MEASURED, "cuda:0"))).tolist() == [0, 12 << 20]
    True
    """
    births = (tape.action == Action.ALLOC) | (tape.action == Action.PREEXISTING)
    if tape.meta.device == "cpu":
        return np.where(births, tape.size, 0)
    settings = Settings.parse(tape.meta.settings)
    result = np.where(births, rounded_sizes(tape.size, settings), 0)
    is_segment = (tape.action == Action.SEGMENT_ALLOC) | (tape.action == Action.SEGMENT_FREE)
    kept = is_segment & (tape.size > SMALL_SEGMENT)
    if kept.any():
        large = births & (result > SMALL)
        # The end of a preexisting block before a free range is told by an empty preexisting block there.
        kept |= large | ((tape.action == Action.PREEXISTING) & (tape.size == 0))
        freed = (tape.action == Action.FREE_COMPLETED) & np.isin(tape.address, tape.address[kept & births])
        rows = np.flatnonzero(kept | freed)
        _absorb(tape, rows, result, settings)
    return result


def underivable_ends(blocks: Iterable[Block]) -> list[int]:
    """Ends of those live blocks whose length the rules of `block_sizes` would not find, by address.

    They lie before a free range: what a block absorbed cannot be told from it any more, nor that it absorbed nothing.
    An empty preexisting row at the end tells it.
    """
    return sorted(
        block.address + block.size
        for block in blocks
        if block.home.pool.kind == "large"
        and block.range is None
        and block.next is not None
        and block.next.free
        and (block.size > -(-block.requested // BLOCK) * BLOCK or block.next.size <= SMALL)
    )


def _absorb(tape: Tape, rows: NDArray[np.int64], result: NDArray[np.int64], settings: Settings) -> None:
    """Add to each large block what was too little to be split off; `rows` are those of the large pool."""
    starts: list[int] = []
    ends: dict[int, int] = {}
    borders: list[int] = []  # where something begins that a block cannot reach into: taken blocks, ends of segments
    taken: dict[int, int] = {}
    waiting: list[tuple[int, int]] = []
    columns = (rows, tape.action[rows], tape.address[rows], tape.size[rows], result[rows])
    preexisting = int(Action.PREEXISTING)
    alloc, freed, segment = int(Action.ALLOC), int(Action.FREE_COMPLETED), int(Action.SEGMENT_ALLOC)
    most = settings.max_split_size

    def extend(row: int, address: int) -> None:
        size = taken[address]
        at = bisect_right(starts, address) - 1
        if at < 0 or address + size > ends[starts[at]]:
            return
        border = borders[bisect_right(borders, address)]
        if 0 < border - address - size <= SMALL or most <= size:
            result[row] = border - address

    for row, action, address, size, rounded in zip(*(column.tolist() for column in columns), strict=True):
        if waiting and action != preexisting:
            for pair in waiting:
                extend(*pair)
            waiting.clear()
        if action == alloc or action == preexisting:  # noqa: SIM109  (a tuple is slower)
            if address not in taken:
                insort(borders, address)
            taken[address] = rounded
            if action == alloc:
                extend(row, address)
            elif size:
                waiting.append((row, address))
        elif action == freed:
            if taken.pop(address, None) is not None:
                del borders[bisect_left(borders, address)]
        elif action == segment:
            insort(starts, address)
            ends[address] = address + size
            insort(borders, address + size)
        elif address in ends:
            del starts[bisect_left(starts, address)]
            del borders[bisect_left(borders, ends.pop(address))]
    for pair in waiting:
        extend(*pair)
