"""Replaying a recorded device against the model: what comes out as recorded."""

from __future__ import annotations

from typing import Any

from memexplore.allocator import cache
from memexplore.allocator.blocks import Block
from memexplore.allocator.core import AllocatorCore
from memexplore.allocator.restore import restore
from memexplore.allocator.settings import SMALL, UNLIMITED
from memexplore.snapshot.history import history, tape_of
from memexplore.snapshot.recorded import Recorded
from memexplore.tape import Action, Tape

_RULES = ("2.11", "2.13", "2.12")
"""A release for each tie-break: snapshots do not tell theirs."""
_SEGMENTS = (Action.SEGMENT_ALLOC, Action.SEGMENT_FREE, Action.SEGMENT_MAP, Action.SEGMENT_UNMAP)
_RELEASES = (Action.SEGMENT_FREE, Action.SEGMENT_UNMAP)
_GROWTH = (Action.SEGMENT_ALLOC, Action.SEGMENT_MAP)
_COUNTED = {
    Action.ALLOC: "alloc_addresses",
    Action.SEGMENT_ALLOC: "segment_allocs",
    Action.SEGMENT_FREE: "segment_frees",
    Action.SEGMENT_MAP: "segment_maps",
    Action.SEGMENT_UNMAP: "segment_unmaps",
}
_Event = tuple[int, int, int]
"""Action, address and size."""


def verify_device(recorded: Recorded) -> dict[str, Any]:
    """What the model reproduces of a device, under the tie-break that fits best; sizes in bytes.

    Pairs are `[as recorded, all]`. A request that the model places elsewhere is put where it was recorded before the
    replay goes on, so one difference does not make a hundred.
    """
    tape = tape_of(recorded)
    best: _Comparison | None = None
    for release in _RULES:
        comparison = _Comparison(recorded, tape, release)
        if best is None or comparison.reproduced() > best.reproduced():
            best = comparison
        if best.is_exact():
            break
    assert best is not None
    return {"device": recorded.device, **best.told(), "history": history(recorded)}


class _Comparison:
    def __init__(self, recorded: Recorded, tape: Tape, release: str) -> None:
        self.recorded = recorded
        self.same = dict.fromkeys(_COUNTED, 0)
        self.all = dict.fromkeys(_COUNTED, 0)
        self.predicted: list[_Event] = []
        self.run: list[_Event] = []
        self.allocator = AllocatorCore(
            recorded.settings,
            release=release,
            on_event=self._event,
            choose_address=self._choose_address,
            finished=lambda stream: False,
        )
        begin, self.blocks = restore(tape, self.allocator)
        self.allocated = sum(block.size for block in self.allocator.live.values())
        self.peak_allocated = self.allocated
        self.peak_reserved = self.allocator.reserved
        self._follow(tape, begin)
        self.final_same, self.final_all = self._final()

    def reproduced(self) -> int:
        """How much came out as recorded."""
        return sum(self.same.values()) + self.final_same

    def is_exact(self) -> bool:
        """Whether all came out as recorded."""
        return self.same == self.all and self.final_same == self.final_all

    def told(self) -> dict[str, Any]:
        """The counts and peaks by name."""
        counts = {name: [self.same[action], self.all[action]] for action, name in _COUNTED.items()}
        return {
            **counts,
            "final_blocks": [self.final_same, self.final_all],
            "peak_allocated": self.peak_allocated,
            "peak_reserved": self.peak_reserved,
        }

    def _event(self, action: Action, address: int, size: int, stream: int) -> None:
        self.predicted.append((action, address, size))
        self.peak_reserved = max(self.peak_reserved, self.allocator.reserved)

    def _choose_address(self, size: int, stream: int) -> int:
        """Where the driver put a segment cannot be predicted: it is taken from the recording."""
        for action, address, length in self.run:
            if action == Action.SEGMENT_MAP or (action == Action.SEGMENT_ALLOC and length == size):
                return address
        self.allocator.next_address += size
        return self.allocator.next_address - size

    def _follow(self, tape: Tape, begin: int) -> None:
        columns = (tape.action[begin:], tape.address[begin:], tape.size[begin:], tape.stream[begin:])
        for action, address, size, stream in zip(*(column.tolist() for column in columns), strict=True):
            if action in _SEGMENTS:
                self.run.append((action, address, size))
            elif action == Action.ALLOC:
                self._alloc(address, size, stream)
            elif action == Action.FREE_REQUESTED:
                self._release()
                block = self.blocks.get(address)
                if block is not None and block.address in self.allocator.live:
                    del self.allocator.live[block.address]
                    self.allocator.pending[block] = None
                    self.allocated -= block.size
            elif action == Action.FREE_COMPLETED:
                # A failed request that waits for other streams ends frees between its own segment rows.
                block = self.blocks.pop(address, None)
                if block is not None:
                    self._complete(block)
            elif action == Action.OOM:
                self._failed(size, stream)
        self._release()

    def _complete(self, block: Block) -> None:
        if block in self.allocator.pending:
            del self.allocator.pending[block]
            block.pending_events = 0
        elif self.allocator.live.pop(block.address, None) is not None:
            self.allocated -= block.size
        self.allocator.merge_free(block)

    def _release(self) -> None:
        """A release of the cache that no request followed."""
        if self.run:
            if any(action in _RELEASES for action, _, _ in self.run):
                self.allocator.release_cached()
            self._compare()

    def _alloc(self, address: int, size: int, stream: int) -> None:
        allocator = self.allocator
        releases = [at for at, event in enumerate(self.run) if event[0] in _RELEASES]
        if releases and any(event[0] == Action.SEGMENT_MAP for event in self.run[: releases[0]]):
            # The device ran out while memory was mapped: only the capacity can tell when.
            allocator.capacity = max(self._reserved_after(releases[0]), self._reserved_after(len(self.run)))
        elif releases:
            allocator.release_cached()
        peak_before = self.peak_reserved
        block = allocator.allocate_block(size, stream)
        allocator.capacity = UNLIMITED
        self.all[Action.ALLOC] += 1
        if block is not None and block.address == address:
            allocator.live[address] = block
            self.same[Action.ALLOC] += 1
        else:
            self.peak_reserved = peak_before
            block = self._force(block, address, size)
            self.peak_reserved = max(peak_before, allocator.reserved)
        self._compare()
        if block is not None:
            self.blocks[address] = block
            self.allocated += block.size
            self.peak_allocated = max(self.peak_allocated, self.allocated)

    def _failed(self, size: int, stream: int) -> None:
        """A request that the device had no memory for: it fails at what was reserved before and after it."""
        releases = [at for at, event in enumerate(self.run) if event[0] in _RELEASES]
        before = self._reserved_after(releases[0] if releases else 0)
        self.allocator.capacity = max(before, self._reserved_after(len(self.run)))
        block = self.allocator.allocate_block(size, stream)
        self.allocator.capacity = UNLIMITED
        if block is not None:
            self.allocator.merge_free(block)
        self._compare()

    def _reserved_after(self, count: int) -> int:
        signs = {Action.SEGMENT_FREE: -1, Action.SEGMENT_UNMAP: -1}
        return self.allocator.reserved + sum(
            size * signs.get(Action(action), 1) for action, _, size in self.run[:count]
        )

    def _compare(self) -> None:
        """Count the segment rows of one request, kind by kind and in order."""
        for kind in _SEGMENTS:
            recorded = [event for event in self.run if event[0] == kind]
            predicted = [event for event in self.predicted if event[0] == kind]
            same = sum(left == right for left, right in zip(recorded, predicted, strict=False))
            surplus = max(len(predicted) - len(recorded), 0)
            self.same[kind] += max(same - surplus, 0)
            self.all[kind] += len(recorded)
        self.run.clear()
        self.predicted.clear()

    def _force(self, wrong: Block | None, address: int, size: int) -> Block | None:
        """Put a request where it was recorded; None where that is no memory that could be free."""
        allocator, predicted = self.allocator, list(self.predicted)
        rounded = allocator.settings.round_size(size)
        pool = allocator.small if rounded <= SMALL else allocator.large
        if wrong is not None:
            allocator.merge_free(wrong)
            if any(action in _GROWTH for action, _, _ in predicted):
                cache.release_block(allocator, wrong)
        for action, start, length in self.run:
            if action == Action.SEGMENT_ALLOC and start == address:
                free_set = allocator.free_set(pool, wrong.free_set.stream if wrong is not None else 0)
                free_set.insert(Block(start, length, free_set, allocator.rank(start), None))
                allocator.update_reserved(Action.SEGMENT_ALLOC, start, length, free_set)
        self.predicted = predicted
        for free_set in pool.free_sets.values():
            for block in free_set.at_least(rounded):
                if block.address <= address and address + rounded <= block.address + block.size:
                    free_set.remove(block)
                    return self._carve(block, address, rounded, size)
        return None

    def _carve(self, block: Block, address: int, rounded: int, requested: int) -> Block:
        """The piece of a free block at an address; what lies before and behind stays free."""
        allocator, free_set = self.allocator, block.free_set
        if block.address < address:
            front = allocator.split(block, address - block.address)
            free_set.insert(front)
            free_set.remove(block)
        rest = block.size - rounded
        if rest >= free_set.min_remainder and rounded < free_set.split_limit:
            block = allocator.split(block, rounded)
        block.requested = requested
        allocator.live[block.address] = block
        return block

    def _final(self) -> tuple[int, int]:
        """Blocks of the recorded layout that the model ends with, and all of them."""
        states = {}
        for run in self.allocator.contiguous_blocks():
            for block in run:
                pending = block in self.allocator.pending
                states[block.address] = (block.size, "free" if block.free else "pending" if pending else "live")
        blocks = [block for segment in self.recorded.segments for block in segment.blocks]
        return sum(states.get(block.address) == (block.size, block.state) for block in blocks), len(blocks)
