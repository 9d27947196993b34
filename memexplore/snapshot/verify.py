"""Replay a recorded device with the allocator model and count the events and blocks that it reproduces."""

from __future__ import annotations

from typing import Any

from memexplore.allocator import cache
from memexplore.allocator.actions import GROWTH, SEGMENT_ACTIONS
from memexplore.allocator.block_allocator import BlockAllocator
from memexplore.allocator.blocks import Block
from memexplore.allocator.restore import restore
from memexplore.snapshot.history import history, tape_of
from memexplore.snapshot.recorded import Recorded
from memexplore.tape import Action, Tape
from memexplore.tape.allocator_settings import SMALL, UNLIMITED

_RELEASES_OF_TORCH = ("2.11", "2.13", "2.12")
"""A torch release for each order of free blocks: snapshots do not record theirs."""
_RELEASES = (Action.SEGMENT_FREE, Action.SEGMENT_UNMAP)
_COUNTED = {
    Action.ALLOC: "alloc_addresses",
    Action.SEGMENT_ALLOC: "segment_allocs",
    Action.SEGMENT_FREE: "segment_frees",
    Action.SEGMENT_MAP: "segment_maps",
    Action.SEGMENT_UNMAP: "segment_unmaps",
}
_LOOKS, _LOOKS_PER_EVENT = 1_000_000, 300
"""Free blocks that may be searched for blocks at recorded addresses; recordings of PyTorch need a tenth."""
_Event = tuple[int, int, int]
"""Action, address and size."""


def verify_device(recorded: Recorded) -> dict[str, Any]:
    """Count the reproduced events and blocks, under the order of free blocks that fits best; sizes in bytes.

    Pairs are `[reproduced, all]`. A request that the model gives another address is moved to the recorded one before
    the replay continues, so that one difference does not cause a hundred.

    Raises ValueError for events that contradict the allocator so often that moving the requests would take hours.
    """
    tape = tape_of(recorded)
    best: _Comparison | None = None
    for release in _RELEASES_OF_TORCH:
        comparison = _Comparison(recorded, tape, release)
        if best is None or comparison.score() > best.score():
            best = comparison
        if best.is_exact():
            break
    assert best is not None
    return {"device": recorded.device, **best.result(), "history": history(recorded)}


class _Comparison:
    """One replay of a recorded device under the rules of a torch release, with its counts."""

    def __init__(self, recorded: Recorded, tape: Tape, release: str) -> None:
        self.recorded = recorded
        self.reproduced = dict.fromkeys(_COUNTED, 0)
        self.all = dict.fromkeys(_COUNTED, 0)
        self.recorded_events: list[_Event] = []
        """Recorded segment events since the last request."""
        self.predicted_events: list[_Event] = []
        """Segment events of the model since the last request."""
        self.allocator = BlockAllocator(
            recorded.settings,
            release=release,
            on_event=self._on_event,
            choose_address=self._recorded_address,
            finished=lambda stream: False,
        )
        self.segments = self.allocator.segments
        self.looks_left = _LOOKS + _LOOKS_PER_EVENT * len(tape)
        begin, self.blocks = restore(tape, self.segments)
        self.allocated = sum(block.size for block in self.segments.live.values())
        self.peak_allocated = self.allocated
        self.peak_reserved = self.segments.reserved
        self._replay(tape, begin)
        self.final_reproduced, self.final_all = self._final_blocks()

    def score(self) -> int:
        """Return the number of reproduced events and blocks."""
        return sum(self.reproduced.values()) + self.final_reproduced

    def is_exact(self) -> bool:
        """Return whether everything was reproduced."""
        return self.reproduced == self.all and self.final_reproduced == self.final_all

    def result(self) -> dict[str, Any]:
        """Return the counts and peaks by name."""
        counts = {name: [self.reproduced[action], self.all[action]] for action, name in _COUNTED.items()}
        return {
            **counts,
            "final_blocks": [self.final_reproduced, self.final_all],
            "peak_allocated": self.peak_allocated,
            "peak_reserved": self.peak_reserved,
        }

    def _on_event(self, action: Action, address: int, size: int, stream: int) -> None:
        self.predicted_events.append((action, address, size))
        self.peak_reserved = max(self.peak_reserved, self.segments.reserved)

    def _recorded_address(self, size: int, stream: int) -> int:
        """Return the recorded address of a new segment: the driver chooses it, so no model can predict it."""
        for action, address, length in self.recorded_events:
            if action == Action.SEGMENT_MAP or (action == Action.SEGMENT_ALLOC and length == size):
                return address
        return self.segments.next_range(size)

    def _replay(self, tape: Tape, begin: int) -> None:
        columns = (tape.action[begin:], tape.address[begin:], tape.size[begin:], tape.stream[begin:])
        for action, address, size, stream in zip(*(column.tolist() for column in columns), strict=True):
            if action in SEGMENT_ACTIONS:
                self.recorded_events.append((action, address, size))
            elif action == Action.ALLOC:
                self._alloc(address, size, stream)
            elif action == Action.FREE_REQUESTED:
                self._release_cache()
                block = self.blocks.get(address)
                if block is not None and block.address in self.segments.live:
                    del self.segments.live[block.address]
                    self.segments.pending[block] = None
                    self.allocated -= block.size
            elif action == Action.FREE_COMPLETED:
                # A failed request that waits for other streams completes frees between its own segment rows.
                block = self.blocks.pop(address, None)
                if block is not None:
                    self._complete_free(block)
            elif action == Action.OOM:
                self._failed_request(size, stream)
        self._release_cache()

    def _complete_free(self, block: Block) -> None:
        if block in self.segments.pending:
            del self.segments.pending[block]
            block.pending_events = 0
        elif self.segments.live.pop(block.address, None) is not None:
            self.allocated -= block.size
        self.segments.merge_free(block)

    def _release_cache(self) -> None:
        """Repeat a recorded release of the cache that no request followed."""
        if self.recorded_events:
            if any(action in _RELEASES for action, _, _ in self.recorded_events):
                self._release_cached()
            self._compare()

    def _release_cached(self) -> None:
        self.allocator.release_cached()
        self._count_looks(sum(len(pool.free_blocks()) + len(pool.free_sets) for pool in self.segments.pools()))

    def _count_looks(self, count: int) -> None:
        self.looks_left -= count
        if self.looks_left < 0:
            raise ValueError("its events contradict the allocator too often for a replay")

    def _alloc(self, address: int, size: int, stream: int) -> None:
        segments, events = self.segments, self.recorded_events
        releases = [at for at, event in enumerate(events) if event[0] in _RELEASES]
        if releases and any(event[0] == Action.SEGMENT_MAP for event in events[: releases[0]]):
            # The device ran out while memory was mapped; the capacity makes the model fail at the same point.
            segments.capacity = max(self._reserved_after(releases[0]), self._reserved_after(len(events)))
        elif releases:
            self._release_cached()
        peak_before = self.peak_reserved
        block = self.allocator.allocate_block(size, stream)
        segments.capacity = UNLIMITED
        self.all[Action.ALLOC] += 1
        if block is not None and block.address == address:
            segments.live[address] = block
            self.reproduced[Action.ALLOC] += 1
        else:
            self.peak_reserved = peak_before
            block = self._move_to(address, size, block)
            self.peak_reserved = max(peak_before, segments.reserved)
        self._compare()
        if block is not None:
            self.blocks[address] = block
            self.allocated += block.size
            self.peak_allocated = max(self.peak_allocated, self.allocated)

    def _failed_request(self, size: int, stream: int) -> None:
        """Repeat a request that ran out of memory, with the reserved memory before or after it as capacity."""
        releases = [at for at, event in enumerate(self.recorded_events) if event[0] in _RELEASES]
        before = self._reserved_after(releases[0] if releases else 0)
        self.segments.capacity = max(before, self._reserved_after(len(self.recorded_events)))
        block = self.allocator.allocate_block(size, stream)
        self.segments.capacity = UNLIMITED
        if block is not None:
            self.segments.merge_free(block)
        self._compare()

    def _reserved_after(self, count: int) -> int:
        """Return the reserved bytes after the first `count` of the recorded segment events."""
        signs = {Action.SEGMENT_FREE: -1, Action.SEGMENT_UNMAP: -1}
        return self.segments.reserved + sum(
            size * signs.get(Action(action), 1) for action, _, size in self.recorded_events[:count]
        )

    def _compare(self) -> None:
        """Count the reproduced segment events of one request, by kind and in order."""
        for kind in SEGMENT_ACTIONS:
            recorded = [event for event in self.recorded_events if event[0] == kind]
            predicted = [event for event in self.predicted_events if event[0] == kind]
            equal = sum(left == right for left, right in zip(recorded, predicted, strict=False))
            surplus = max(len(predicted) - len(recorded), 0)
            self.reproduced[kind] += max(equal - surplus, 0)
            self.all[kind] += len(recorded)
        self.recorded_events.clear()
        self.predicted_events.clear()

    def _move_to(self, address: int, size: int, wrong: Block | None) -> Block | None:
        """Free the block of a request and allocate it at the recorded address; None if that memory is not free."""
        segments, predicted = self.segments, list(self.predicted_events)
        rounded = segments.settings.round_size(size)
        pool = segments.small if rounded <= SMALL else segments.large
        if wrong is not None:
            segments.merge_free(wrong)
            if any(action in GROWTH for action, _, _ in predicted):
                cache.release_block(segments, wrong)
        for action, start, length in self.recorded_events:
            if action == Action.SEGMENT_ALLOC and start == address:
                free_set = segments.free_set(pool, wrong.free_set.stream if wrong is not None else 0)
                free_set.insert(Block(start, length, free_set, segments.rank(start), None))
                segments.update_reserved(Action.SEGMENT_ALLOC, start, length, free_set)
        self.predicted_events = predicted
        for free_set in pool.free_sets.values():
            self._count_looks(1)
            for block in free_set.at_least(rounded):
                self._count_looks(1)
                if block.address <= address and address + rounded <= block.address + block.size:
                    free_set.remove(block)
                    return self._allocate_at(address, block, rounded, size)
        return None

    def _allocate_at(self, address: int, block: Block, rounded: int, requested: int) -> Block:
        """Allocate a piece of a free block at an address; what lies before and behind it stays free."""
        segments, free_set = self.segments, block.free_set
        if block.address < address:
            front = segments.split(block, address - block.address)
            free_set.insert(front)
            free_set.remove(block)
        remainder = block.size - rounded
        if remainder >= free_set.min_remainder and rounded < free_set.split_limit:
            block = segments.split(block, rounded)
        block.requested = requested
        segments.live[block.address] = block
        return block

    def _final_blocks(self) -> tuple[int, int]:
        """Return how many blocks of the recorded final layout the model reproduces, and their number."""
        states = {}
        for blocks in self.segments.contiguous_blocks():
            for block in blocks:
                pending = block in self.segments.pending
                states[block.address] = (block.size, "free" if block.free else "pending" if pending else "live")
        recorded = [block for segment in self.recorded.segments for block in segment.blocks]
        return sum(states.get(block.address) == (block.size, block.state) for block in recorded), len(recorded)
