"""Make a Tape of a recorded device: its events, preceded by rows for the memory held before the first event.

That initial state is found by undoing the events from the final layout backwards.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from memexplore.allocator import block_sizes
from memexplore.allocator.actions import GROWTH, SEGMENT_ACTIONS
from memexplore.allocator.placement import system_of_address
from memexplore.analysis.segments import MappedRanges
from memexplore.snapshot.imported import annotate
from memexplore.snapshot.recorded import Recorded
from memexplore.snapshot.stacks import Stacks
from memexplore.tape import Action, Meta, Os, Source, Tape

_LATEST = 1 << 53
"""Microseconds, 285 years: no clock shows more, and nanoseconds of more do not fit into 64 bits."""
_FREES = (Action.FREE_REQUESTED, Action.FREE_COMPLETED)


class _InitialBlock(NamedTuple):
    """A block allocated before the first event, sizes in bytes; `size` is -1 if the file does not record it."""

    address: int
    requested: int
    stream: int
    size: int
    pending: bool
    stack: int


def history(recorded: Recorded) -> str:
    """Return how much of the history a snapshot holds: `complete` from the first segment on, `late`, or `none`."""
    if not np.any(recorded.action == Action.ALLOC):
        return "none"
    return "late" if _initial_regions(recorded) or _initial_blocks(recorded) else "complete"


def _operating_system(recorded: Recorded) -> Os:
    """Return the operating system by the lowest segment, Linux for a file with expandable segments only."""
    new = recorded.address[recorded.action == Action.SEGMENT_ALLOC].tolist()
    addresses = [*new, *(segment.address for segment in recorded.segments if not segment.expandable)]
    return system_of_address(min(addresses)) if addresses else Os.LINUX


def tape_of(recorded: Recorded) -> Tape:
    """Return the Tape of a device: rows for the initial segments and blocks, then the recorded events.

    Initial segments are segment_alloc rows, or a segment_map row for each mapped run of an expandable segment;
    initial blocks are preexisting rows behind them. An empty preexisting block, freed at once, marks the end of a
    block whose size does not follow from its request and neighbours. `imported` infers steps, phases and categories.
    """
    meta = Meta(
        Source.IMPORTED, f"cuda:{recorded.device}", settings=str(recorded.settings), os=_operating_system(recorded)
    )
    stacks = Stacks(recorded)
    first: list[tuple[int, int, int, int, int]] = []
    late = history(recorded) != "complete"
    if late:
        for address, size, stream, expandable in _initial_regions(recorded):
            first.append((Action.SEGMENT_MAP if expandable else Action.SEGMENT_ALLOC, address, size, stream, -1))
        blocks = _initial_blocks(recorded)
        pending = [block for block in blocks if block.pending]
        live = [block for block in blocks if not block.pending]
        ends = _unusual_ends(first, blocks, meta)
        if first and not ends and not live:
            # Separates these rows from the events; behind all memory it is the end of no block.
            ends = [(max(row[1] + row[2] for row in first), first[0][3])]
        # Pending blocks come first: they are not allocated, and no curve may count them on top of all others.
        for action, group in (
            (Action.PREEXISTING, pending),
            (Action.FREE_REQUESTED, pending),
            (Action.PREEXISTING, live),
        ):
            first += [(action, block.address, block.requested, block.stream, block.stack) for block in group]
        first += [(Action.PREEXISTING, address, 0, stream, -1) for address, stream in ends]
        for address, stream in ends:
            first += [(action, address, 0, stream, -1) for action in _FREES]
    rows = np.array(first, dtype=np.int64).reshape(-1, 5)
    recorded_columns = (recorded.action, recorded.address, recorded.size, recorded.stream, recorded.stack)
    columns = [np.concatenate((rows[:, at], column)) for at, column in enumerate(recorded_columns)]
    stack = columns[4]
    tape = Tape.from_columns(
        {
            "time": _time(recorded, len(rows)),
            "action": columns[0],
            "address": np.where(columns[0] == Action.OOM, -1, columns[1]),
            "size": columns[2],
            "stream": columns[3],
            "stack": stacks.number[stack],
            "op": stacks.op[stack],
            "module": stacks.module[stack],
        },
        meta=meta,
        ops=list(stacks.ops),
        modules=list(stacks.modules),
        stacks=stacks.stacks,
    )
    tape = annotate(tape, stacks, stack)
    return tape.replace(meta=meta._replace(capacity=_capacity(tape, recorded.device_free)))


def _capacity(tape: Tape, device_free: int | None) -> int | None:
    """Return the bytes that could be reserved, from the free bytes that the first oom reports; None without one."""
    ooms = np.flatnonzero(tape.action == Action.OOM)
    if device_free is None or not len(ooms):
        return None
    return int(reserved(tape)[ooms[0]]) + device_free


def reserved(tape: Tape) -> NDArray[np.int64]:
    """Return the bytes of all segments after each row."""
    grown = np.isin(tape.action, GROWTH)
    shrunk = np.isin(tape.action, (Action.SEGMENT_FREE, Action.SEGMENT_UNMAP))
    return np.cumsum(np.where(grown, tape.size, 0) - np.where(shrunk, tape.size, 0))


def initial_row_count(tape: Tape) -> int:
    """Return the number of rows at the start of a tape that describe the state before its first event."""
    preexisting = np.flatnonzero(tape.action == Action.PREEXISTING)
    if not len(preexisting):
        return 0
    begin = int(preexisting[-1]) + 1
    while begin < len(tape) and tape.size[begin] == 0 and tape.action[begin] in _FREES:
        begin += 1
    return begin


def first_time(recorded: Recorded) -> int | None:
    """Return the time of the first event in microseconds since 1970; None without a clock."""
    if not len(recorded.time) or recorded.time.min() < 0 or recorded.time.max() > _LATEST:
        return None
    return int(recorded.time[0])


def _time(recorded: Recorded, initial: int) -> NDArray[np.int64]:
    """Return nanoseconds since the first event, 0 for the initial rows; row numbers without a clock."""
    first = first_time(recorded)
    if first is None:
        return np.arange(initial + len(recorded.time))
    elapsed = (recorded.time - first) * 1000
    return np.concatenate((np.zeros(initial, dtype=np.int64), elapsed))


def _initial_regions(recorded: Recorded) -> list[tuple[int, int, int, bool]]:
    """Return address, size, stream and expandability of each segment and mapped run before the first event."""
    fixed = {segment.address: (segment.size, segment.stream) for segment in recorded.segments if not segment.expandable}
    mapped = MappedRanges(
        (segment.address, segment.address + segment.size, segment.stream)
        for segment in recorded.segments
        if segment.expandable
    )
    kinds = SEGMENT_ACTIONS
    rows = np.flatnonzero(np.isin(recorded.action, kinds))[::-1]
    columns = (recorded.action[rows], recorded.address[rows], recorded.size[rows], recorded.stream[rows])
    for action, address, size, stream in zip(*(column.tolist() for column in columns), strict=True):
        if action == Action.SEGMENT_ALLOC:
            fixed.pop(address, None)
        elif action == Action.SEGMENT_FREE:
            fixed[address] = (size, stream)
        elif action == Action.SEGMENT_MAP:
            mapped.remove(address, address + size)
        else:
            mapped.add(address, address + size, stream)
    regions = [(address, size, stream, False) for address, (size, stream) in fixed.items() if size]
    regions += [(start, end - start, stream, True) for start, end, stream in mapped.all()]
    return sorted(regions)


def _initial_blocks(recorded: Recorded) -> list[_InitialBlock]:
    """Return the blocks of the final layout without an event, and the blocks whose first event is a free."""
    kinds = (Action.ALLOC, *_FREES)
    rows = np.flatnonzero(np.isin(recorded.action, kinds))
    addresses, first = np.unique(recorded.address[rows], return_index=True)
    first = rows[first]
    blocks = []
    freed = first[recorded.action[first] != Action.ALLOC]
    columns = (recorded.address[freed], recorded.size[freed], recorded.stream[freed], recorded.action[freed])
    for address, size, stream, action in zip(*(column.tolist() for column in columns), strict=True):
        blocks.append(_InitialBlock(address, size, stream, -1, action == Action.FREE_COMPLETED, -1))
    with_events = set(addresses.tolist())
    for segment in recorded.segments:
        for block in segment.blocks:
            if block.state != "free" and block.address not in with_events:
                pending = block.state == "pending"
                fields = (block.address, block.requested, segment.stream, block.size, pending, block.stack)
                blocks.append(_InitialBlock(*fields))
    return sorted(blocks)


def _unusual_ends(
    regions: list[tuple[int, int, int, int, int]], blocks: list[_InitialBlock], meta: Meta
) -> list[tuple[int, int]]:
    """Return ends and streams of the blocks whose recorded size is not the one that `block_sizes` derives."""
    preexisting = [(Action.PREEXISTING, block.address, block.requested) for block in blocks]
    rows = np.array([*(row[:3] for row in regions), *preexisting], dtype=np.int64).reshape(-1, 3)
    tape = Tape.from_columns({"action": rows[:, 0], "address": rows[:, 1], "size": rows[:, 2]}, meta=meta)
    derived = block_sizes(tape)[tape.action == Action.PREEXISTING].tolist()
    taken = {block.address for block in blocks}
    return [
        (block.address + block.size, block.stream)
        for block, size in zip(blocks, derived, strict=True)
        if block.size >= 0 and block.size != size and block.address + block.size not in taken
    ]
