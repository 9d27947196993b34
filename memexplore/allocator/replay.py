"""A tape's requests, asked again under some settings."""

from __future__ import annotations

import array
from collections.abc import Iterable, Iterator

import numpy as np
from numpy.typing import NDArray

from memexplore.allocator.blocks import Block
from memexplore.allocator.gc_pause import held_back
from memexplore.allocator.placement import Placement
from memexplore.allocator.restore import restore
from memexplore.allocator.settings import SMALL_SEGMENT, Settings
from memexplore.tape import Action, Tape

_OLDEST_RULES = "2.11"  # for tapes that do not tell their release: the tie-break was the same from 1.x to 2.11
_CHUNK = 1 << 17
"""Rows that are turned into Python's numbers at once."""
_PAIR = 100  # a free_requested row whose free_completed comes next
_DEVICE = (Action.SEGMENT_ALLOC, Action.SEGMENT_MAP)
_RELEASES = (Action.SEGMENT_FREE, Action.SEGMENT_UNMAP)
_WAITING = frozenset({-1})  # a stream that never finishes: frees end where the tape says so, or when all is waited for


def rules_of(tape: Tape) -> str:
    """The torch release whose rules a tape follows."""
    return tape.meta.versions.get("torch") or _OLDEST_RULES


def replay(tape: Tape, settings: Settings | None = None) -> Tape:
    """Ask an allocator for everything that the tape asked for; the tape comes back placed anew, with segment rows.

    Without `settings` the tape's own hold, blocks that were there before it stay where they were and segments get the
    addresses that the tape tells. Where the tape knows its capacity, the allocator itself decides when to release,
    and a request beyond the capacity ends the tape with an oom row; otherwise the cache is released where the tape
    says so. An oom of the tape that does not happen again is left out.

    >>> from memexplore.tape import Meta, Source
    >>> rows = {"action": [Action.ALLOC] * 2, "address": [1, 2], "size": [100, 3 << 20]}
    >>> placed = replay(Tape.from_columns(rows, meta=Meta(Source.MEASURED, "cuda:0")))
    >>> [Action(action).name for action in placed.action]
    ['SEGMENT_ALLOC', 'ALLOC', 'SEGMENT_ALLOC', 'ALLOC']

    Raises ValueError where a row frees an address that holds no block. An alloc at an address that is still taken ends
    the block before it.
    """
    own = Settings.parse(tape.meta.settings)
    chosen = own if settings is None else settings
    replayed = _Replay(tape, chosen, stays=chosen == own).tape()
    return replayed.replace(meta=replayed.meta._replace(settings=str(chosen)))


def assign_addresses(tape: Tape, settings: Settings) -> Tape:
    """Place a tape without segment rows on an empty device; its addresses only tell which free belongs to which alloc.

    The capacity and the release are those of the tape's metadata. A request beyond the capacity ends the tape.

    >>> from memexplore.tape import Meta, Source
    >>> rows = {"action": [Action.ALLOC] * 2, "address": [1, 2], "size": [100, 3 << 20]}
    >>> placed = assign_addresses(Tape.from_columns(rows, meta=Meta(Source.PREDICTED, "cuda:0")), Settings())
    >>> int(placed.size[placed.action == Action.SEGMENT_ALLOC].sum()) >> 20  # a small segment of 2 MiB, one of 20
    22

    Raises ValueError where a row frees an address that holds no block.
    """
    return _Replay(tape, settings, stays=False).tape()


class _Replay:
    """One replay: the requests of the tape in order, and what comes out."""

    def __init__(self, tape: Tape, settings: Settings, *, stays: bool) -> None:
        self.recorded = tape
        self.row = 0
        self.new: list[tuple[int, int, int, int, int]] = []
        """Rows to insert: the row before which, action, address, size and stream."""
        self.placed = array.array("q", tape.address.tobytes())
        self.end = len(tape)
        self.early: dict[Block, int] = {}
        """Blocks whose free waits, by the row of the tape that asked for it."""
        self.over: set[int] = set()
        """Addresses of the tape whose free ended before the tape says so."""
        self.highest = int((tape.address + tape.size).max(initial=0))
        self.dropped = np.isin(tape.action, (*_DEVICE, *_RELEASES))
        self.placement = Placement(
            settings,
            capacity=tape.meta.capacity,
            total=tape.meta.total,
            release=rules_of(tape),
            on_event=self._event,
            choose_address=self._choose_address if stays else None,
            finished=lambda stream: False,
        )
        self.placement.on_completed = self._completed_early
        begin, self.blocks = restore(tape, self.placement) if stays else (0, {})
        self.dropped[:begin] = False
        with held_back():
            self._follow(begin)

    def _event(self, action: Action, address: int, size: int, stream: int) -> None:
        self.new.append((self.row, int(action), address, size, stream))

    def _completed_early(self, block: Block) -> None:
        """Tell a free that ends because the allocator waits for every stream."""
        address = int(self.recorded.address[self.early.pop(block)])
        del self.blocks[address]
        self.over.add(address)
        self.new.append((self.row, int(Action.FREE_COMPLETED), block.address, block.requested, block.home.stream))

    def _choose_address(self, size: int, stream: int) -> int:
        """The address that the tape gives the segment of the present request, else one behind all others."""
        tape = self.recorded
        for row in self._device_rows(self.row):
            if tape.action[row] == Action.SEGMENT_MAP or tape.size[row] == size:
                return int(tape.address[row])
        address = max(self.placement.next_address, -(-self.highest // SMALL_SEGMENT) * SMALL_SEGMENT)
        self.placement.next_address = address + size
        return address

    def _device_rows(self, row: int) -> Iterator[int]:
        """The segment rows directly before a row."""
        first = row
        while first > 0 and self.dropped[first - 1]:
            first -= 1
        return (before for before in range(first, row) if self.recorded.action[before] in _DEVICE)

    def _follow(self, begin: int) -> None:
        rows, actions = self._steps(begin)
        tape = self.recorded
        for start in range(0, len(rows), _CHUNK):
            some = rows[start : start + _CHUNK]
            columns = (some, actions[start : start + _CHUNK], tape.address[some], tape.size[some], tape.stream[some])
            if not self._ask(zip(*(column.tolist() for column in columns), strict=True)):
                return

    def _ask(self, steps: Iterable[tuple[int, ...]]) -> bool:
        """Follow some rows; whether the device had memory for them."""
        blocks, placed = self.blocks, self.placed
        take, settle = self.placement.take, self.placement.settle
        alloc, preexisting = int(Action.ALLOC), int(Action.PREEXISTING)
        for row, action, address, size, stream in steps:
            if action == _PAIR:
                block = blocks.pop(address, None)
                if block is None or block.waiting:
                    if size:
                        raise self._unknown(row)
                    continue
                placed[row] = placed[row + 1] = block.address
                settle(block)
            elif action == alloc or action == preexisting:  # noqa: SIM109  (a tuple is slower)
                self.row = row
                block = take(size, stream) if size else None
                if block is not None:
                    if address in blocks:
                        self._free_unseen(blocks[address])
                    blocks[address] = block
                    placed[row] = block.address
                elif size:
                    self._event(Action.OOM, -1, self.placement.settings.round_size(size), stream)
                    self.end = row
                    return False
            else:
                self.row = row
                self._seldom(row, action, address, size, stream)
        return True

    def _steps(self, begin: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """The rows that matter to the allocator, and what to do there."""
        tape = self.recorded
        action = tape.action.astype(np.int64)
        asks = np.flatnonzero(tape.action[:-1] == Action.FREE_REQUESTED)
        done = (tape.action[asks + 1] == Action.FREE_COMPLETED) & (tape.address[asks + 1] == tape.address[asks])
        pairs = asks[done]
        action[pairs] = _PAIR
        kept = np.isin(tape.action, (Action.ALLOC, Action.PREEXISTING, Action.FREE_REQUESTED, Action.FREE_COMPLETED))
        kept |= tape.action == Action.OOM
        kept[pairs + 1] = False
        kept[:begin] = False
        kept[self._releases()] = True
        rows = np.flatnonzero(kept)
        return rows, action[rows]

    def _releases(self) -> list[int]:
        """The rows at which the cache was released by `empty_cache`, not for a request that found no memory."""
        tape = self.recorded
        release = np.isin(tape.action, _RELEASES)
        first = np.flatnonzero(release & ~np.concatenate(([False], release[:-1])))
        capacity = tape.meta.capacity
        if capacity is None or not len(first):
            return first.tolist()
        growth = np.isin(tape.action, _DEVICE)
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

    def _seldom(self, row: int, action: int, address: int, size: int, stream: int) -> None:
        """A free that waits for another stream, a release of the cache, a request that failed."""
        placement, blocks = self.placement, self.blocks
        if action in _RELEASES:
            placement.release_cached()
        elif action == Action.OOM:
            block = placement.take(size, stream)
            if block is None:
                self.placed[row] = -1
            else:
                placement.settle(block)
                self.dropped[row] = True
        elif action == Action.FREE_COMPLETED and address in self.over:
            self.over.remove(address)
            self.dropped[row] = True
        elif address not in blocks or (action == Action.FREE_REQUESTED and blocks[address].waiting):
            if size:
                raise self._unknown(row)
        elif action == Action.FREE_REQUESTED:
            block = blocks[address]
            self.placed[row] = block.address
            block.uses = set(_WAITING)
            self.early[block] = row
            placement.give_back(block)
        else:
            block = blocks.pop(address)
            self.early.pop(block, None)
            placement.forget(block)
            self.placed[row] = block.address
            placement.settle(block)

    def _free_unseen(self, block: Block) -> None:
        """Free a block whose address the tape hands out again: it left out the free."""
        self.early.pop(block, None)
        self.placement.forget(block)
        self.placement.settle(block)

    def _unknown(self, row: int) -> ValueError:
        return ValueError(f"row {row} frees {int(self.recorded.address[row]):#x}, where no block is allocated")

    def tape(self) -> Tape:
        """The rows that remain and the new ones, in order."""
        tape = self.recorded
        rows = np.flatnonzero(~self.dropped[: self.end])
        new = np.array(self.new, dtype=np.int64).reshape(-1, 5)
        # A new row belongs to the request before which it stands: it shares its time, layer and stack.
        source = np.concatenate((new[:, 0], rows))
        order = np.argsort(source, kind="stable")
        source = source[order]
        columns = {
            name: getattr(tape, name)[source] for name in ("time", "category", "phase", "step", "op", "module", "stack")
        }
        address = np.frombuffer(self.placed, dtype=np.int64)
        columns["action"] = np.concatenate((new[:, 1], tape.action[rows]))[order]
        columns["address"] = np.concatenate((new[:, 2], address[rows]))[order]
        columns["size"] = np.concatenate((new[:, 3], tape.size[rows]))[order]
        columns["stream"] = np.concatenate((new[:, 4], tape.stream[rows]))[order]
        return Tape.from_columns(columns, meta=tape.meta, ops=tape.ops, modules=tape.modules, stacks=tape.stacks)
