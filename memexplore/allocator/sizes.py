"""Find the size of the block that each request of a tape received, and write sizes as PyTorch does."""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort
from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

from memexplore.allocator.blocks import Block
from memexplore.tape import Action, Tape
from memexplore.tape.allocator_settings import BLOCK, SMALL, SMALL_SEGMENT, Settings


def rounded_sizes(sizes: NDArray[np.int64], settings: Settings) -> NDArray[np.int64]:
    """Apply `Settings.round_size` to a column; 0 stays 0, because an empty request never reaches the allocator."""
    if not any(settings.roundup_power2_divisions):
        return (sizes + (BLOCK - 1)) & -BLOCK
    distinct, inverse = np.unique(sizes, return_inverse=True)
    rounded = [settings.round_size(size) if size > 0 else 0 for size in distinct.tolist()]
    return np.array(rounded, dtype=np.int64)[inverse]


def block_sizes(tape: Tape) -> NDArray[np.int64]:
    """Return the bytes of the block of each alloc or preexisting row, 0 on every other row.

    A block is the rounded request. In the large pool it also has the remainder that is too small to split off: up to
    1 MiB between it and the next taken block or the end of its segment (docs/allocator.md section 6). The tape must
    have device addresses, as `replay` assigns them. On a CPU a block is the request itself.

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
    selected = is_segment & (tape.size > SMALL_SEGMENT)
    if selected.any():
        large = births & (result > SMALL)
        # An empty preexisting row marks the end of a preexisting block before a free range (`underivable_ends`).
        selected |= large | ((tape.action == Action.PREEXISTING) & (tape.size == 0))
        freed = (tape.action == Action.FREE_COMPLETED) & np.isin(tape.address, tape.address[selected & births])
        _add_remainders(tape, np.flatnonzero(selected | freed), result, settings)
    return result


def underivable_ends(blocks: Iterable[Block]) -> list[int]:
    """Return the ends of the live blocks whose size `block_sizes` cannot derive, by address.

    They lie before a free range, so the tape does not show what such a block absorbed, nor that it absorbed nothing.
    An empty preexisting row at its end makes up for that.
    """
    return sorted(
        block.address + block.size
        for block in blocks
        if block.free_set.pool.kind == "large"
        and block.expandable is None
        and block.next is not None
        and block.next.free
        and (block.size > -(-block.requested // BLOCK) * BLOCK or block.next.size <= SMALL)
    )


def _add_remainders(tape: Tape, rows: NDArray[np.int64], result: NDArray[np.int64], settings: Settings) -> None:
    """Add to each large block in `result` the remainder that was too small to split off; `rows`: the large pool's."""
    pool = _LargePool(settings.max_split_size)
    preexisting_blocks: list[tuple[int, int]] = []
    """Rows and addresses: their remainders are found once all of them are taken."""
    columns = (rows, tape.action[rows], tape.address[rows], tape.size[rows], result[rows])
    preexisting = int(Action.PREEXISTING)
    alloc, freed, segment = int(Action.ALLOC), int(Action.FREE_COMPLETED), int(Action.SEGMENT_ALLOC)

    def extend_preexisting() -> None:
        for row, address in preexisting_blocks:
            result[row] = pool.block_size(address)
        preexisting_blocks.clear()

    for row, action, address, size, rounded in zip(*(column.tolist() for column in columns), strict=True):
        if preexisting_blocks and action != preexisting:
            extend_preexisting()
        if action == alloc:
            pool.take(address, rounded)
            result[row] = pool.block_size(address)
        elif action == preexisting:
            pool.take(address, rounded)
            if size:
                preexisting_blocks.append((row, address))
        elif action == freed:
            pool.free(address)
        elif action == segment:
            pool.add_segment(address, size)
        else:
            pool.remove_segment(address)
    extend_preexisting()


class _LargePool:
    """Segments and taken blocks of the large pool by address, at one row of a tape."""

    def __init__(self, max_split_size: int) -> None:
        self._max_split_size = max_split_size
        self._starts: list[int] = []
        """Addresses of the segments, sorted."""
        self._ends: dict[int, int] = {}
        """From the address of a segment to its end."""
        self._borders: list[int] = []
        """Addresses that a block cannot extend over, sorted: of taken blocks, and ends of segments."""
        self._taken: dict[int, int] = {}
        """From the address of a taken block to its rounded request."""

    def take(self, address: int, rounded: int) -> None:
        if address not in self._taken:
            insort(self._borders, address)
        self._taken[address] = rounded

    def free(self, address: int) -> None:
        if self._taken.pop(address, None) is not None:
            self._remove_border(address)

    def add_segment(self, address: int, size: int) -> None:
        if address in self._ends:  # in a tape that lacks the free
            self._remove_border(self._ends[address])
        else:
            insort(self._starts, address)
        self._ends[address] = address + size
        insort(self._borders, address + size)

    def remove_segment(self, address: int) -> None:
        if address in self._ends:
            del self._starts[bisect_left(self._starts, address)]
            self._remove_border(self._ends.pop(address))

    def block_size(self, address: int) -> int:
        """Return the bytes of a taken block: its rounded request and the remainder that was not split off."""
        size = self._taken[address]
        segment = bisect_right(self._starts, address) - 1
        if segment < 0 or address + size > self._ends[self._starts[segment]]:
            return size
        border = self._borders[bisect_right(self._borders, address)]
        absorbs = 0 < border - address - size <= SMALL or self._max_split_size <= size
        return border - address if absorbs else size

    def _remove_border(self, address: int) -> None:
        del self._borders[bisect_left(self._borders, address)]


def format_size(size: int) -> str:
    """Format a size as PyTorch's own messages do; memexplore's messages use `units`.

    >>> format_size(1024), format_size(3 * 1024**2), format_size(8 * 1024**3)
    ('1024 bytes', '3.00 MiB', '8.00 GiB')
    """
    if size <= 1024:
        return f"{size} bytes"
    for unit, bytes_of_unit in (("KiB", 1024), ("MiB", 1024**2)):
        if size <= 1024 * bytes_of_unit:
            return f"{size / bytes_of_unit:.2f} {unit}"
    return f"{size / 1024**3:.2f} GiB"
