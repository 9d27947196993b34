"""Map the addresses of a Tape after a row: segments, blocks, free gaps; fragmentation in numbers and in a sentence."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from memexplore.allocator.actions import GROWTH
from memexplore.analysis.curves import Rows, block_bytes, lifetimes
from memexplore.analysis.segments import segments_at_end
from memexplore.tape import Tape
from memexplore.tape.allocator_settings import LARGE_SEGMENT, SMALL_SEGMENT
from memexplore.text.units import size_text


class AddressMap(NamedTuple):
    """Segments and blocks after a row, both sorted by address; sizes in bytes."""

    start: Rows
    length: Rows
    """Length of each segment; each mapped range of an expandable segment counts as one."""
    expandable: NDArray[np.bool_]
    small: NDArray[np.bool_]
    row: Rows
    """The alloc row of each block, a row number of the tape."""
    address: Rows
    size: Rows
    requested: Rows
    pending: NDArray[np.bool_]
    """Freed blocks that wait for another stream."""
    segment: Rows
    """The index of the segment of each block, -1 for none."""


class Fragmentation(NamedTuple):
    """Reserved bytes after a row by use."""

    reserved: int
    allocated: int
    waiting: int
    """Freed blocks that wait for another stream."""
    internal: int
    """Internal fragmentation: block sizes minus requested sizes."""
    external: int
    """External fragmentation: free gaps between blocks."""
    largest: int
    """The largest contiguous free gap."""
    releasable: int
    """Bytes that `empty_cache` would release: free segments, and free pages of expandable segments."""


def has_segments(tape: Tape) -> bool:
    """Return whether the tape has segment rows, as a tape of a caching allocator has."""
    return bool(np.isin(tape.action, GROWTH).any())


def address_map(tape: Tape, row: int) -> AddressMap:
    """Return the segments and blocks of a placed tape after a row.

    >>> from memexplore.allocator import replay
    >>> from memexplore.tape import Action, Meta, Source
    >>> tape = replay(Tape.from_columns({"action": [Action.ALLOC], "address": [1], "size": [700]},
    ...                                 meta=Meta(Source.MEASURED, "cuda:0")))
    >>> address_map(tape, 1).length.tolist(), address_map(tape, 1).size.tolist()
    ([2097152], [1024])

    Raises IndexError for a row outside the tape, ValueError for a tape that is not placed.
    """
    if not 0 <= row < len(tape):
        raise IndexError(f"row {row} is outside this tape of {len(tape)} rows")
    life = lifetimes(tape)
    here = (life.born <= row) & (life.completed > row) & (block_bytes(tape)[life.born] > 0)
    born, free_requested = life.born[here], life.requested[here]
    order = np.argsort(tape.address[born], kind="stable")
    born, free_requested = born[order], free_requested[order]
    segments = segments_at_end(tape[: row + 1])
    start = np.array([region[0] for region in segments], dtype=np.int64)
    end = np.array([region[1] for region in segments], dtype=np.int64)
    address = tape.address[born]
    segment = np.searchsorted(start, address, side="right") - 1
    outside = (segment < 0) | (address >= np.append(end, 0)[segment])
    return AddressMap(
        start,
        end - start,
        np.array([region[3] for region in segments], dtype=bool),
        np.array([region[4] for region in segments], dtype=bool),
        born,
        address,
        block_bytes(tape)[born],
        tape.size[born],
        free_requested <= row,
        np.where(outside, -1, segment),
    )


def gaps(shown: AddressMap) -> tuple[Rows, Rows, Rows]:
    """Return address, size and segment index of each free gap, sorted by address."""
    inside = shown.segment >= 0
    count = len(shown.start)
    # A gap begins at the start of a segment or the end of a block; it ends at the next block or the end of the segment.
    begins = np.concatenate((shown.start, (shown.address + shown.size)[inside]))
    ends = np.concatenate((shown.address[inside], shown.start + shown.length))
    segment = np.concatenate((np.arange(count), shown.segment[inside]))
    order = np.lexsort((begins, segment))
    begins, segment = begins[order], segment[order]
    ends = ends[np.lexsort((ends, np.concatenate((shown.segment[inside], np.arange(count)))))]
    free = ends > begins
    return begins[free], (ends - begins)[free], segment[free]


def fragmentation(tape: Tape, row: int) -> Fragmentation:
    """Return the reserved bytes after a row by use.

    >>> from memexplore.allocator import replay
    >>> from memexplore.tape import Action, Meta, Source
    >>> tape = replay(Tape.from_columns({"action": [Action.ALLOC], "address": [1], "size": [700]},
    ...                                 meta=Meta(Source.MEASURED, "cuda:0")))
    >>> result = fragmentation(tape, 1)
    >>> result.allocated, result.internal, result.external, result.releasable
    (1024, 324, 2096128, 0)

    Raises IndexError and ValueError as `address_map` does.
    """
    shown = address_map(tape, row)
    begins, sizes, segment = gaps(shown)
    is_whole = sizes == shown.length[segment] if len(sizes) else np.zeros(0, dtype=bool)
    page = np.where(shown.small[segment], SMALL_SEGMENT, LARGE_SEGMENT)
    offset = begins - shown.start[segment]
    pages = np.maximum((offset + sizes) // page - -(-offset // page), 0) * page
    releasable = np.where(shown.expandable[segment], np.where(is_whole, sizes, pages), np.where(is_whole, sizes, 0))
    held = shown.size[~shown.pending]
    return Fragmentation(
        int(shown.length.sum()),
        int(held.sum()),
        int(shown.size[shown.pending].sum()),
        int((shown.size - shown.requested).sum()),
        int(sizes.sum()),
        int(sizes.max(initial=0)),
        int(releasable.sum()),
    )


def fragmentation_text(tape: Tape, row: int) -> str:
    """Return the fragmentation after a row as one sentence.

    >>> from memexplore.allocator import replay
    >>> from memexplore.tape import Action, Meta, Source
    >>> tape = replay(Tape.from_columns({"action": [Action.ALLOC], "address": [1], "size": [700]},
    ...                                 meta=Meta(Source.MEASURED, "cuda:0")))
    >>> fragmentation_text(tape, 1)[:56]
    '1.00 KiB of 2.00 MiB reserved in 1 segment are allocated'

    Raises IndexError and ValueError as `address_map` does.
    """
    result = fragmentation(tape, row)
    if not result.reserved:
        return "No memory is reserved: the allocator holds no segment."
    count = len(address_map(tape, row).start)
    segments = f"{count:,} segment{'s' if count > 1 else ''}"
    waiting = f", {size_text(result.waiting)} wait for another stream" if result.waiting else ""
    first = (
        f"{size_text(result.allocated)} of {size_text(result.reserved)} reserved in {segments} are allocated{waiting}"
    )
    inner = f"{size_text(result.internal)} of the blocks is rounding (internal fragmentation)"
    outer = f"{size_text(result.external)} is free between them (external)"
    largest = f"the largest gap {size_text(result.largest)}"
    release = (
        f"empty_cache could release {size_text(result.releasable)}"
        if result.releasable
        else "empty_cache could release nothing, because every segment holds a block"
    )
    return f"{first}; {inner}, {outer}, {largest}; {release}."
