"""From a recorded device to a Tape: what was there before the first event is found by walking backwards."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from memexplore.allocator import block_sizes
from memexplore.analysis.segments import MappedRanges
from memexplore.snapshot.imported import understand
from memexplore.snapshot.recorded import Recorded
from memexplore.snapshot.stacks import Stacks
from memexplore.tape import Action, Meta, Source, Tape

_FREES = (Action.FREE_REQUESTED, Action.FREE_COMPLETED)


class _Before(NamedTuple):
    """A block that was there before the first event, sizes in bytes; `held` is -1 where its size is not recorded."""

    address: int
    requested: int
    stream: int
    held: int
    pending: bool
    stack: int


def history(recorded: Recorded) -> str:
    """How much of a device's history a snapshot holds: `complete` from the first segment on, `late`, or `none`."""
    if not np.any(recorded.action == Action.ALLOC):
        return "none"
    return "late" if _regions_before(recorded) or _blocks_before(recorded) else "complete"


def tape_of(recorded: Recorded) -> Tape:
    """The Tape of a device: its events, before them the segments and blocks that were already there.

    Blocks that were there are preexisting rows behind the segment rows (segment_alloc; segment_map for each mapped
    run of an expandable segment). An empty preexisting block, freed at once, marks the end of a block whose length
    cannot be told from its size and neighbours. Steps, phases and categories are decided from the stacks (`imported`).
    """
    meta = Meta(Source.IMPORTED, f"cuda:{recorded.device}", settings=str(recorded.settings))
    stacks = Stacks(recorded)
    first: list[tuple[int, int, int, int, int]] = []
    late = history(recorded) != "complete"
    if late:
        for address, size, stream, expandable in _regions_before(recorded):
            first.append((Action.SEGMENT_MAP if expandable else Action.SEGMENT_ALLOC, address, size, stream, -1))
        blocks = _blocks_before(recorded)
        waiting = [block for block in blocks if block.pending]
        held = [block for block in blocks if not block.pending]
        borders = _borders(first, blocks, meta)
        if first and not borders and not held:
            # Tells these rows from those of the first event; behind all memory it borders on nothing.
            borders = [(max(row[1] + row[2] for row in first), first[0][3])]
        # Those that wait come first: they are not allocated, and no curve shall have them on top of all others.
        for action, group in (
            (Action.PREEXISTING, waiting),
            (Action.FREE_REQUESTED, waiting),
            (Action.PREEXISTING, held),
        ):
            first += [(action, each.address, each.requested, each.stream, each.stack) for each in group]
        first += [(Action.PREEXISTING, address, 0, stream, -1) for address, stream in borders]
        for address, stream in borders:
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
    tape = understand(tape, stacks, stack)
    return tape.replace(meta=meta._replace(capacity=_capacity(tape, recorded.device_free)))


def _capacity(tape: Tape, device_free: int | None) -> int | None:
    """What the allocator could reserve, where an oom tells what was left; None without one."""
    ooms = np.flatnonzero(tape.action == Action.OOM)
    if device_free is None or not len(ooms):
        return None
    return int(reserved(tape)[ooms[0]]) + device_free


def reserved(tape: Tape) -> NDArray[np.int64]:
    """Bytes of all segments after each row."""
    grown = np.isin(tape.action, (Action.SEGMENT_ALLOC, Action.SEGMENT_MAP))
    shrunk = np.isin(tape.action, (Action.SEGMENT_FREE, Action.SEGMENT_UNMAP))
    return np.cumsum(np.where(grown, tape.size, 0) - np.where(shrunk, tape.size, 0))


def initial_row_count(tape: Tape) -> int:
    """The number of a tape's first rows that tell what was there before its first event."""
    before = np.flatnonzero(tape.action == Action.PREEXISTING)
    if not len(before):
        return 0
    begin = int(before[-1]) + 1
    while begin < len(tape) and tape.size[begin] == 0 and tape.action[begin] in _FREES:
        begin += 1
    return begin


def _time(recorded: Recorded, before: int) -> NDArray[np.int64]:
    """Nanoseconds since the first event; row numbers without a clock."""
    count = len(recorded.time)
    if not count or recorded.time.min() < 0:
        return np.arange(before + count)
    elapsed = (recorded.time - recorded.time[0]) * 1000
    return np.concatenate((np.zeros(before, dtype=np.int64), elapsed))


def _regions_before(recorded: Recorded) -> list[tuple[int, int, int, bool]]:
    """Address, size, stream and whether it is expandable of the memory that was there, by address."""
    whole = {segment.address: (segment.size, segment.stream) for segment in recorded.segments if not segment.expandable}
    mapped = MappedRanges(
        {each.address: (each.address + each.size, each.stream) for each in recorded.segments if each.expandable}
    )
    kinds = (Action.SEGMENT_ALLOC, Action.SEGMENT_FREE, Action.SEGMENT_MAP, Action.SEGMENT_UNMAP)
    rows = np.flatnonzero(np.isin(recorded.action, kinds))[::-1]
    columns = (recorded.action[rows], recorded.address[rows], recorded.size[rows], recorded.stream[rows])
    for action, address, size, stream in zip(*(column.tolist() for column in columns), strict=True):
        if action == Action.SEGMENT_ALLOC:
            whole.pop(address, None)
        elif action == Action.SEGMENT_FREE:
            whole[address] = (size, stream)
        elif action == Action.SEGMENT_MAP:
            mapped.remove(address, address + size)
        else:
            mapped.add(address, address + size, stream)
    regions = [(address, size, stream, False) for address, (size, stream) in whole.items()]
    regions += [(start, end - start, stream, True) for start, (end, stream) in mapped.runs.items()]
    return sorted(regions)


def _blocks_before(recorded: Recorded) -> list[_Before]:
    """The blocks that were there: those of the final layout without an event, and those whose first event is a free."""
    kinds = (Action.ALLOC, *_FREES)
    rows = np.flatnonzero(np.isin(recorded.action, kinds))
    addresses, first = np.unique(recorded.address[rows], return_index=True)
    first = rows[first]
    blocks = []
    freed = first[recorded.action[first] != Action.ALLOC]
    columns = (recorded.address[freed], recorded.size[freed], recorded.stream[freed], recorded.action[freed])
    for address, size, stream, action in zip(*(column.tolist() for column in columns), strict=True):
        blocks.append(_Before(address, size, stream, -1, action == Action.FREE_COMPLETED, -1))
    with_events = set(addresses.tolist())
    for segment in recorded.segments:
        for block in segment.blocks:
            if block.state != "free" and block.address not in with_events:
                waits = block.state == "pending"
                before = _Before(block.address, block.requested, segment.stream, block.size, waits, block.stack)
                blocks.append(before)
    return sorted(blocks)


def _borders(regions: list[tuple[int, int, int, int, int]], blocks: list[_Before], meta: Meta) -> list[tuple[int, int]]:
    """Ends and streams of the blocks whose recorded size is not the one that the tape's rules would give them."""
    before = [(Action.PREEXISTING, block.address, block.requested) for block in blocks]
    rows = np.array([*(row[:3] for row in regions), *before], dtype=np.int64).reshape(-1, 3)
    tape = Tape.from_columns({"action": rows[:, 0], "address": rows[:, 1], "size": rows[:, 2]}, meta=meta)
    derived = block_sizes(tape)[tape.action == Action.PREEXISTING].tolist()
    taken = {block.address for block in blocks}
    return [
        (block.address + block.held, block.stream)
        for block, size in zip(blocks, derived, strict=True)
        if block.held >= 0 and block.held != size and block.address + block.held not in taken
    ]
