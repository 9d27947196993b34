"""Rows of a recording that no op writes: older blocks, frees, streams, segments and marks go in, rows come out."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from typing import Any

import torch

from memexplore.recorder.events import Origin
from memexplore.recorder.stacks import Stacks, shared_tables
from memexplore.recorder.stream_timing import EarlyFrees, LateFrees
from memexplore.recorder.tags import Tags
from memexplore.tape import Action, Category, Phase
from memexplore.virtual_gpu.dispatch.interrupts import uninterrupted

_clock = time.perf_counter_ns
_OTHER, _UNKNOWN = int(Phase.OTHER), int(Category.UNKNOWN)
_ALLOC, _FREE, _MARK, _PREEXISTING = (
    int(action) for action in (Action.ALLOC, Action.FREE_REQUESTED, Action.MARK, Action.PREEXISTING)
)
_NEW_SEGMENT = int(Action.SEGMENT_ALLOC), int(Action.SEGMENT_MAP)


class Rows(Tags):
    """The rows of a recording, tuples in the order of `Event`; the base of `Recorder`, which writes those of ops."""

    def __init__(self, live: dict[int, Any], adopt: Callable[[torch.Tensor], Any] | None) -> None:
        super().__init__(live, adopt)
        self.events: list[tuple[int, ...]] = []
        self.ops: dict[str, int] = {}
        self.stacks = Stacks(shared_tables())
        self.tensors: dict[int, str] = {}
        """Row -> shape and dtype of the tensor that the block was allocated for (`tensor_text`), empty if unknown."""
        self.streams: dict[int, int] = {}
        """Row -> stream of a block or segment, without those of the default stream."""
        self.late, self.early = LateFrees(), EarlyFrees()
        self.step = 0
        self.marked = (0, _OTHER)
        """Step and phase of the last mark."""
        self.dead: deque[Any] = deque()
        """The `Ref`s of storages that have died since the last row; `settle` writes their rows."""
        self.kept: set[int] = set()
        """Rows of blocks that earlier steps of the run left, and that nothing has shown to be inputs."""
        self.epoch = _clock()

    def preexisting(
        self,
        address: int,
        size: int,
        origin: Origin | None,
        category: Category = Category.UNKNOWN,
        tensor: str = "",
        stream: int = 0,
    ) -> None:
        """Record a block older than the recording."""
        if stream:
            self.streams[len(self.events)] = stream
        if origin is not None:
            self._from_before(_PREEXISTING, 0, address, size, origin, category, tensor)
            return
        row = self.open_rows[address] = len(self.events)
        self.tensors[row] = tensor
        self.events.append((0, _PREEXISTING, address, size, _OTHER, 0, -1, -1, -1, 0, -1, category))

    def reallocated(self, address: int, size: int, origin: Origin | None, tensor: str = "") -> None:
        """Record an earlier block that is placed on this device only now."""
        now = _clock() - self.epoch
        self._from_before(_ALLOC, now, address, size, origin, Category.UNKNOWN, tensor)

    def _from_before(
        self, action: int, now: int, address: int, size: int, origin: Origin | None, category: Category, tensor: str
    ) -> None:
        row = self.open_rows[address] = len(self.events)
        self.tensors[row] = tensor
        op = module = stack = -1
        if origin is not None:
            op = self.ops.setdefault(origin.op, len(self.ops)) if origin.op else -1
            module = self.names.intern(origin.module) if origin.module else -1
            stack = self.stacks.intern_frames(origin.stack) if origin.stack else -1
            category = origin.category
        phase, step = (_OTHER, 0) if action == _PREEXISTING else (self.marked[1], self.step)
        self.events.append((now, action, address, size, phase, step, op, module, stack, 0, -1, category))

    def free(self, address: int, size: int) -> None:
        """Record a freed block."""
        phase, step = self.marked[1], self.step
        row = self.open_rows.pop(address, -1)
        self.events.append((_clock() - self.epoch, _FREE, address, size, phase, step, -1, -1, -1, 0, row, _UNKNOWN))
        if self.late.uses:
            self.late.freed(row, len(self.events) - 1)
        if self.early.free_from:
            self.early.freed(row, len(self.events) - 1)

    @uninterrupted
    def settle(self) -> None:
        """Write the rows of the storages that have died since the last row, in the order in which they died."""
        dead, live = self.dead, self.live
        if not dead:
            return
        now, phase, step = _clock() - self.epoch, self.marked[1], self.step
        while dead:
            ref = dead.popleft()
            found: Any = live.get(ref.key)
            if found is ref:
                del live[ref.key]
                if ref.size:  # a storage that `resize_(0)` has emptied has no block
                    row = self.open_rows.pop(ref.address, -1)
                    self.events.append((now, _FREE, ref.address, ref.size, phase, step, -1, -1, -1, 0, row, _UNKNOWN))

    def used_on(self, address: int, stream: int) -> None:
        """Record that a stream uses a block: if it is another one than the block's, the free waits for it."""
        row = self.open_rows.get(address, -1)
        if row >= 0 and self.streams.get(row, 0) != stream:
            self.late.uses.setdefault(row, set()).add(stream)

    def may_be_free(self, address: int) -> None:
        """Record that a block is free from now on if the GPU does not lag."""
        self.early.may_be_free(self.open_rows.get(address, -1), len(self.events))

    def position(self) -> int:
        """Return the number of events so far."""
        return len(self.events)

    def ordered(self, stream: int, other: int, until: int | None) -> None:
        """Record that a stream waits for another one's work up to a `position`, None for all so far."""
        self.late.ordered(stream, len(self.events), other, len(self.events) if until is None else until)

    def finished(self, stream: int | None, until: int | None) -> None:
        """Record that the program waits for a stream's work up to a `position`; None: of all streams, all so far."""
        if self.late.ends:
            self.late.finished(stream, len(self.events) if until is None else until, len(self.events))

    def segment(self, action: Action, address: int, size: int, stream: int = 0) -> None:
        """Record a segment that the allocator got or returned."""
        if action is not Action.OOM:
            if stream:
                self.streams[len(self.events)] = stream
            phase, step = self.marked[1], self.step
            self.events.append((_clock() - self.epoch, action, address, size, phase, step, -1, -1, -1, 0, -1, _UNKNOWN))

    def mark(self, phase: int) -> None:
        """Mark that a phase begins."""
        self.marked = (self.step, phase)
        now = _clock() - self.epoch
        self.events.append((now, _MARK, -1, 0, phase, self.step, -1, -1, -1, 0, -1, _UNKNOWN))

    def mark_before_segments(self, phase: int) -> None:
        """Mark a phase that begins with a request, before the segments that the allocator got for the request."""
        events = self.events
        end = start = len(events)
        while start and events[start - 1][1] in _NEW_SEGMENT:
            start -= 1
        segments = events[start:]
        del events[start:]
        self.mark(phase)
        events += [(*event[:4], phase, self.step, *event[6:]) for event in segments]
        for row in range(end, start, -1):
            if row - 1 in self.streams:
                self.streams[row] = self.streams.pop(row - 1)
