"""Repeat the requests of a tape under some settings: new addresses and segment rows, or out of memory."""

from __future__ import annotations

import array
import itertools
from collections.abc import Iterable, Iterator
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from memexplore.allocator.actions import GROWTH
from memexplore.allocator.block_allocator import BlockAllocator
from memexplore.allocator.blocks import Block
from memexplore.allocator.gc_pause import gc_paused
from memexplore.allocator.placement import Placement, placement_on
from memexplore.allocator.restore import restore
from memexplore.tape import Action, Ending, Meta, Tape
from memexplore.tape.allocator_settings import SMALL_SEGMENT, Settings
from memexplore.tape.process_limit import limited

_DEFAULT_RELEASE = "2.11"  # for tapes without a torch version: free blocks had one order from 1.x to 2.11
_CHUNK = 1 << 17
"""Rows that are converted to Python's numbers at once."""
_FREE_AT_ONCE = 100  # a free_requested row whose free_completed comes next
_RELEASES = (Action.SEGMENT_FREE, Action.SEGMENT_UNMAP)
_SEGMENTS = (*GROWTH, *_RELEASES)
_TOTAL = 1 << 40
"""Memory of a device that a tape does not know."""
_UNFINISHED = frozenset({-1})  # a stream that never finishes: a free ends with its row, or with a wait for all streams


def release_of(tape: Tape) -> str:
    """Return the torch release whose rules hold for a tape."""
    return tape.meta.versions.get("torch") or _DEFAULT_RELEASE


def replay(tape: Tape, settings: Settings | None = None) -> Tape:
    """Repeat all requests of a tape and return it with new addresses and segment rows.

    Without `settings` those of the tape hold, preexisting blocks keep their addresses, and segments get the addresses
    that the tape records. Under other settings, and for a tape without segment rows, the driver of the tape's operating
    system places them. If the tape has a capacity, the allocator decides when to release its cache, and a request
    beyond the capacity ends the tape with an oom row; otherwise the cache is released where the tape has it released.
    An oom row of the tape is left out if its request now succeeds.

    >>> from memexplore.tape import Meta, Source
    >>> rows = {"action": [Action.ALLOC] * 2, "address": [1, 2], "size": [100, 3 << 20]}
    >>> replayed = replay(Tape.from_columns(rows, meta=Meta(Source.MEASURED, "cuda:0")))
    >>> [Action(action).name for action in replayed.action]
    ['SEGMENT_ALLOC', 'ALLOC', 'SEGMENT_ALLOC', 'ALLOC']

    Raises ValueError if a row frees an address without a block. An alloc at an address that is still taken frees the
    block there first.
    """
    own = Settings.parse(tape.meta.settings)
    chosen = own if settings is None else settings
    has_segments = bool(np.isin(tape.action, GROWTH).any())
    replayed = _Replay(tape, chosen, keeps_addresses=chosen == own and has_segments).tape()
    return replayed.replace(meta=replayed.meta._replace(settings=str(chosen)))


def assign_addresses(tape: Tape, settings: Settings) -> Tape:
    """Repeat the requests of a tape without segment rows on an empty device.

    The tape's own addresses only connect each free with its alloc. Capacity and release are those of its metadata. A
    request beyond the capacity ends the tape.

    >>> from memexplore.tape import Meta, Source
    >>> rows = {"action": [Action.ALLOC] * 2, "address": [1, 2], "size": [100, 3 << 20]}
    >>> result = assign_addresses(Tape.from_columns(rows, meta=Meta(Source.PREDICTED, "cuda:0")), Settings())
    >>> int(result.size[result.action == Action.SEGMENT_ALLOC].sum()) >> 20  # a small segment of 2 MiB, one of 20
    22

    Raises ValueError if a row frees an address without a block.
    """
    return _Replay(tape, settings, keeps_addresses=False).tape()


def replay_placed(tape: Tape, placement: Placement) -> Tape:
    """Repeat all requests of a tape under its own settings, with new segments where a placement puts them.

    Blocks that the tape begins with are requested first, in the order of its rows. Raises as `replay` does.
    """
    return _Replay(tape, Settings.parse(tape.meta.settings), keeps_addresses=False, placement=placement).tape()


class Trial(NamedTuple):
    """How a replay on a device of some capacity went."""

    reserved: int
    """Peak reserved in bytes."""
    retries: int
    """How often the allocator released its cache because the device had no more memory."""
    rows: int
    """Rows that were repeated: all, or those before the request that failed."""


def trial(tape: Tape, settings: Settings, capacity: int | None, optional: NDArray[np.bool_] | None = None) -> Trial:
    """Repeat the requests of a tape on an empty device of some capacity, None for no limit, until one fails.

    Requests whose failure the tape records are left out; rows that are `optional` may fail. `settings` without a limit
    on the process.

    >>> from memexplore.tape import Source
    >>> rows = {"action": [Action.ALLOC, Action.FREE_REQUESTED, Action.FREE_COMPLETED, Action.ALLOC],
    ...         "address": [1, 1, 1, 2], "size": [12 << 20, 12 << 20, 12 << 20, 20 << 20]}
    >>> tape = Tape.from_columns(rows, meta=Meta(Source.MEASURED, "cuda:0"))
    >>> for size in (32, 20, 19):
    ...     print(trial(tape, Settings(), size << 20))
    Trial(reserved=33554432, retries=0, rows=4)
    Trial(reserved=20971520, retries=1, rows=4)
    Trial(reserved=12582912, retries=1, rows=3)

    Raises ValueError if a row frees an address without a block.
    """
    # The addresses of expandable segments depend on the total memory, which stays the same for all capacities.
    total = tape.meta.total or _TOTAL
    meta = tape.meta._replace(capacity=capacity, total=total, capacity_without_limit=None, limit=None)
    replayed = _Replay(tape, settings, keeps_addresses=False, meta=meta, left_out=(Action.OOM,), optional=optional)
    changes = (
        size if action in GROWTH else -size for _, action, _, size, _ in replayed.inserted if action in _SEGMENTS
    )
    return Trial(max(itertools.accumulate(changes), default=0), replayed.allocator.retries, replayed.end)


class _Replay:
    """One replay: the requests of a tape in order, and the resulting tape."""

    def __init__(
        self,
        tape: Tape,
        settings: Settings,
        *,
        keeps_addresses: bool,
        placement: Placement | None = None,
        meta: Meta | None = None,
        left_out: tuple[Action, ...] = (),
        optional: NDArray[np.bool_] | None = None,
    ) -> None:
        self.recorded = tape
        self.left_out = left_out
        self.optional = optional
        self.absent: set[int] = set()
        """Addresses of the tape of optional requests that failed."""
        self.row = 0
        self.inserted: list[tuple[int, int, int, int, int]] = []
        """New rows: the row before which each stands, action, address, size and stream."""
        self.new_address = array.array("q", tape.address.tobytes())
        self.end = len(tape)
        self.pending: dict[Block, int] = {}
        """Blocks whose free is pending, with the row that requested it."""
        self.completed_early: set[int] = set()
        """Addresses of the tape whose free completed before the tape's own row."""
        self.highest = int((tape.address + tape.size).max(initial=0))
        self.dropped = np.isin(tape.action, _SEGMENTS)
        meta = tape.meta if meta is None else meta
        self.allocator = BlockAllocator(
            settings,
            capacity=limited(meta, None).capacity,
            total=meta.total,
            release=release_of(tape),
            on_event=self._event,
            choose_address=self._recorded_address if keeps_addresses else None,
            placement=placement_on(meta.os) if placement is None else placement,
            finished=lambda stream: False,
        )
        if meta.capacity_without_limit is not None:
            self.allocator.limit_to(meta.capacity)
        self.allocator.on_pending_completed = self._complete_early
        begin, self.blocks = restore(tape, self.allocator.segments) if keeps_addresses else (0, {})
        self.dropped[:begin] = False
        with gc_paused():
            self._run(begin)

    def _event(self, action: Action, address: int, size: int, stream: int) -> None:
        self.inserted.append((self.row, int(action), address, size, stream))

    def _complete_early(self, block: Block) -> None:
        """Insert the end of a free that completes because the allocator waits for every stream."""
        address = int(self.recorded.address[self.pending.pop(block)])
        del self.blocks[address]
        self.completed_early.add(address)
        self._event(Action.FREE_COMPLETED, block.address, block.requested, block.free_set.stream)

    def _recorded_address(self, size: int, stream: int) -> int:
        """Return the address that the tape records for the segment of the present request, else one behind all."""
        tape = self.recorded
        for row in self._growth_before(self.row):
            if tape.action[row] == Action.SEGMENT_MAP or tape.size[row] == size:
                return int(tape.address[row])
        segments = self.allocator.segments
        segments.next_address = max(segments.next_address, -(-self.highest // SMALL_SEGMENT) * SMALL_SEGMENT)
        return segments.next_range(size)

    def _growth_before(self, row: int) -> Iterator[int]:
        """Return the rows with new memory among the segment rows directly before a row."""
        first = row
        while first > 0 and self.dropped[first - 1]:
            first -= 1
        return (before for before in range(first, row) if self.recorded.action[before] in GROWTH)

    def _run(self, begin: int) -> None:
        rows, actions = self._steps(begin)
        tape = self.recorded
        for start in range(0, len(rows), _CHUNK):
            chunk = rows[start : start + _CHUNK]
            columns = (
                chunk,
                actions[start : start + _CHUNK],
                tape.address[chunk],
                tape.size[chunk],
                tape.stream[chunk],
            )
            if not self._run_chunk(zip(*(column.tolist() for column in columns), strict=True)):
                return

    def _run_chunk(self, steps: Iterable[tuple[int, ...]]) -> bool:
        """Repeat some rows; return whether the device had memory for them."""
        blocks, new_address = self.blocks, self.new_address
        allocate_block, merge_free = self.allocator.allocate_block, self.allocator.segments.merge_free
        alloc, preexisting = int(Action.ALLOC), int(Action.PREEXISTING)
        for row, action, address, size, stream in steps:
            if action == _FREE_AT_ONCE:
                block = blocks.pop(address, None)
                if block is None or block.pending_events:
                    if size and not self._was_absent(address):
                        raise self._no_block(row)
                    continue
                new_address[row] = new_address[row + 1] = block.address
                merge_free(block)
            elif action == alloc or action == preexisting:  # noqa: SIM109  (a tuple is slower)
                self.row = row
                block = allocate_block(size, stream) if size else None
                if block is not None:
                    if address in blocks:
                        self._free_unrecorded(blocks[address])
                    blocks[address] = block
                    new_address[row] = block.address
                elif size and self.optional is not None and self.optional[row]:
                    self.absent.add(address)
                elif size:
                    self._event(Action.OOM, -1, self.allocator.settings.round_size(size), stream)
                    self.end = row
                    return False
            else:
                self.row = row
                self._run_rare(row, action, address, size, stream)
        return True

    def _steps(self, begin: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Return the rows that concern the allocator, and the action of each."""
        tape = self.recorded
        action = tape.action.astype(np.int64)
        requested = np.flatnonzero(tape.action[:-1] == Action.FREE_REQUESTED)
        at_once = (tape.action[requested + 1] == Action.FREE_COMPLETED) & (
            tape.address[requested + 1] == tape.address[requested]
        )
        pairs = requested[at_once]
        action[pairs] = _FREE_AT_ONCE
        selected = np.isin(
            tape.action, (Action.ALLOC, Action.PREEXISTING, Action.FREE_REQUESTED, Action.FREE_COMPLETED)
        )
        selected |= tape.action == Action.OOM
        selected[pairs + 1] = False
        selected[:begin] = False
        selected[self._releases()] = True
        selected &= ~np.isin(tape.action, self.left_out)
        rows = np.flatnonzero(selected)
        return rows, action[rows]

    def _releases(self) -> list[int]:
        """Return the rows at which `empty_cache` released the cache, not the retry of a request."""
        tape = self.recorded
        release = np.isin(tape.action, _RELEASES)
        first = np.flatnonzero(release & ~np.concatenate(([False], release[:-1])))
        capacity = tape.meta.capacity
        if capacity is None or not len(first):
            return first.tolist()
        growth = np.isin(tape.action, GROWTH)
        reserved = np.cumsum(np.where(growth, tape.size, 0) - np.where(release, tape.size, 0))
        others = np.flatnonzero(~release)
        rows = []
        for row in first.tolist():
            after = np.searchsorted(others, row)
            following = int(others[after]) if after < len(others) else row
            before = int(reserved[row]) + int(tape.size[row])
            needed = int(tape.size[following]) if growth[following] else 0
            if tape.action[following] != Action.OOM and before + needed <= capacity:
                rows.append(row)
        return rows

    def _run_rare(self, row: int, action: int, address: int, size: int, stream: int) -> None:
        """Repeat a free that waits for another stream, a release of the cache, or a request that failed."""
        allocator, blocks = self.allocator, self.blocks
        if action in _RELEASES:
            allocator.release_cached()
        elif action == Action.OOM:
            block = allocator.allocate_block(size, stream)
            if block is None:
                self.new_address[row] = -1
            else:
                allocator.segments.merge_free(block)
                self.dropped[row] = True
        elif action == Action.FREE_COMPLETED and address in self.completed_early:
            self.completed_early.remove(address)
            self.dropped[row] = True
        elif address not in blocks or (action == Action.FREE_REQUESTED and blocks[address].pending_events):
            if size and not self._was_absent(address):
                raise self._no_block(row)
        elif action == Action.FREE_REQUESTED:
            block = blocks[address]
            self.new_address[row] = block.address
            block.other_streams = set(_UNFINISHED)
            self.pending[block] = row
            allocator.free_block(block)
        else:
            block = blocks.pop(address)
            self.pending.pop(block, None)
            allocator.cancel_events(block)
            self.new_address[row] = block.address
            allocator.segments.merge_free(block)

    def _free_unrecorded(self, block: Block) -> None:
        """Free a block whose address the tape hands out again without a free in between."""
        self.pending.pop(block, None)
        self.allocator.cancel_events(block)
        self.allocator.segments.merge_free(block)

    def _was_absent(self, address: int) -> bool:
        """Return whether a free is that of an optional request that failed."""
        is_absent = address in self.absent
        self.absent.discard(address)
        return is_absent

    def _no_block(self, row: int) -> ValueError:
        return ValueError(f"row {row} frees {int(self.recorded.address[row]):#x}, where no block is allocated")

    def tape(self) -> Tape:
        """Return the remaining and the inserted rows in order."""
        tape = self.recorded
        rows = np.flatnonzero(~self.dropped[: self.end])
        inserted = np.array(self.inserted, dtype=np.int64).reshape(-1, 5)
        # An inserted row belongs to the request before which it stands: it shares its time, layer and stack.
        source = np.concatenate((inserted[:, 0], rows))
        order = np.argsort(source, kind="stable")
        source = source[order]
        columns = {
            name: getattr(tape, name)[source] for name in ("time", "category", "phase", "step", "op", "module", "stack")
        }
        address = np.frombuffer(self.new_address, dtype=np.int64)
        # Of the inserted rows only a request that failed is for a tensor, and no workspace follows it.
        tensor = np.where(inserted[:, 1] == Action.OOM, tape.tensor[inserted[:, 0]], -1)
        columns["tensor"] = np.concatenate((tensor, tape.tensor[rows]))[order]
        columns["workspace"] = np.concatenate((np.full(len(inserted), -1), tape.workspace[rows]))[order]
        columns["action"] = np.concatenate((inserted[:, 1], tape.action[rows]))[order]
        columns["address"] = np.concatenate((inserted[:, 2], address[rows]))[order]
        columns["size"] = np.concatenate((inserted[:, 3], tape.size[rows]))[order]
        columns["stream"] = np.concatenate((inserted[:, 4], tape.stream[rows]))[order]
        meta = tape.meta
        if self.end < len(tape):
            meta = meta._replace(ending=Ending.OUT_OF_MEMORY, error="")
        elif meta.ending is Ending.OUT_OF_MEMORY and not np.any(columns["action"] == Action.OOM):
            # The request that ended the program succeeds here: what the program would do next is unknown.
            meta = meta._replace(ending=Ending.UNKNOWN, error="")
        return tape.with_rows(columns, meta=meta)
