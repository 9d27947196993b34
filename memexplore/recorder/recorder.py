"""The recorder: ops, module calls and optimizer steps go in; rows of allocated and freed blocks come out.

Each row has the op, module, phase, step and stack; `tape_builder` decides the categories afterwards.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from types import FrameType
from typing import Any

import torch

from memexplore.recorder.communication import Communication, is_followed, makes_bucket
from memexplore.recorder.copies import COPY, COPYING, Copies
from memexplore.recorder.cpu_training import CpuTraining
from memexplore.recorder.events import Origin, needs_gradient, op_name
from memexplore.recorder.stacks import Stacks, caller
from memexplore.recorder.stream_timing import EarlyFrees, LateFrees
from memexplore.recorder.tags import Tags
from memexplore.recorder.thread_state import Threads, ThreadState
from memexplore.tape import Action, Category, Phase
from memexplore.torch_internals.distributed import is_initialized
from memexplore.torch_internals.tensors import (
    current_autograd_node,
    next_sequence_number,
    sequence_number_of,
)

_EMPTY = torch.ops.aten.empty.memory_format
_DETACH = torch.ops.aten.detach.default
_ACCUMULATE = 2**64 - 1
"""Sequence number of every AccumulateGrad node: torch/csrc/autograd/functions/accumulate_grad.cpp."""
_FORWARD, _BACKWARD, _OPTIMIZER, _OTHER = (int(phase) for phase in Phase)
_UNKNOWN = int(Category.UNKNOWN)
_ALLOC, _FREE, _MARK, _OOM, _PREEXISTING = (
    int(action) for action in (Action.ALLOC, Action.FREE_REQUESTED, Action.MARK, Action.OOM, Action.PREEXISTING)
)
_NEW_SEGMENT = int(Action.SEGMENT_ALLOC), int(Action.SEGMENT_MAP)


class Recorder(Tags):
    """The rows of one recording, as plain numbers; no tensor is kept.

    `live` maps a storage's C++ address to its `Ref` and is updated by the dispatch mode that runs the ops. `events` are
    tuples in the order of `Event`.
    """

    def __init__(self, live: dict[int, Any], adopt: Callable[[torch.Tensor], Any] | None = None) -> None:
        super().__init__(live, adopt)
        self.events: list[tuple[int, ...]] = []
        self.ops: dict[str, int] = {}
        self.stacks = Stacks()
        self.tensors: dict[int, str] = {}
        """Row -> shape and dtype of the tensor that the block was allocated for (`tensor_text`), empty if unknown."""
        self.streams: dict[int, int] = {}
        """Row -> stream of a block or segment, without those of the default stream."""
        self.late, self.early = LateFrees(), EarlyFrees()
        self.call_ends_at: list[int] = []
        """Call number -> number of events when it ended, -1 while it is open."""
        self.step = 0
        self._known_ops: dict[int, tuple[int, bool, Any]] = {}
        """Id of an op -> its number, whether it copies, and the op, whose own hash takes longer."""
        self._threads = Threads()
        self._local = self._threads.local
        self._marked = (0, _OTHER)
        """Step and phase of the last mark."""
        self._step_ended = True
        self.training: CpuTraining | None = CpuTraining()
        """None where the CPU itself is recorded."""
        self.on_model_call: Callable[[torch.nn.Module, Any, FrameType | None], None] | None = None
        """Called with each call of a module from outside of any."""
        self.copies = Copies(live, self.open_rows)
        self.communication = Communication(self.row_of, self.tags)
        self._followed: dict[int, tuple[bool, Any]] = {}
        """Id of an op -> whether ranks communicate by it, and the op."""
        self._epoch = time.perf_counter_ns()

    # -- called by the dispatch mode

    def op(self, func: Any, args: Any, depth: int = 3) -> None:
        """Record that an op is about to run: module and stack of the autograd node that its forward just created.

        `args` has the keyword arguments at its end. The dispatch mode's own frame is `depth` calls above this one; the
        stack begins there.
        """
        here = self._local.state
        here.stack = -2
        sequence = next_sequence_number()
        if sequence != here.sequence:
            here.sequence = sequence
            here.stack = stack = self.stacks.number(caller(depth))
            calls = here.calls
            here.forwards[sequence - 1] = (calls[-1][0] if calls else -1, stack, func)
        if func is _DETACH:
            node = current_autograd_node()
            if node is not None and sequence_number_of(node) == _ACCUMULATE:
                # AccumulateGrad detaches the incoming gradient to keep it: accumulate_grad.h.
                self.tag(args[0], Category.GRADIENT, self.owner_of(node.variable))
        elif func is COPY and not here.calls:
            self.copies.copied(*args[:2])
        followed = self._followed.get(id(func))
        if followed is None:
            followed = self._followed[id(func)] = is_followed(func), func
        if followed[0]:
            self.communication.op(func, args, len(self.events))

    def alloc(
        self,
        address: int,
        size: int,
        func: Any,
        args: Any,
        index: int,
        category: Category,
        tensor: str = "",
        stream: int = 0,
    ) -> None:
        """Record an allocated block, with the `tensor_text` of the tensor that it is for."""
        phase, module, stack, grad, call = self._attribution(func, args, index)
        number, copies, _ = self._known_ops.get(id(func)) or self._know(func)
        row = self.open_rows[address] = len(self.events)
        self.tensors[row] = tensor
        if stream:
            self.streams[row] = stream
        if category == _UNKNOWN and phase == _BACKWARD and call == -2:
            self.tags[row] = Category.GRADIENT
            call = -1
        elif copies and call < 0 and phase in (_OTHER, _FORWARD):
            self.copies.computed(row, args, size)
        elif func is _EMPTY and is_initialized() and makes_bucket():
            # Beside the buckets the Reducer sends numbers: which parameter is in which bucket, and which are used.
            self.tags[row] = Category.COMMUNICATION_BUFFER if tensor.startswith("int") else Category.GRADIENT_BUCKET
        now = time.perf_counter_ns() - self._epoch
        self.events.append((now, _ALLOC, address, size, phase, self.step, number, module, stack, grad, call, category))

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
        now = time.perf_counter_ns() - self._epoch
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
        phase, step = (_OTHER, 0) if action == _PREEXISTING else (self._marked[1], self.step)
        self.events.append((now, action, address, size, phase, step, op, module, stack, 0, -1, category))

    def free(self, address: int, size: int) -> None:
        """Record a freed block."""
        phase, step = self._marked[1], self.step
        row = self.open_rows.pop(address, -1)
        self.events.append(
            (time.perf_counter_ns() - self._epoch, _FREE, address, size, phase, step, -1, -1, -1, 0, row, _UNKNOWN)
        )
        if self.late.uses:
            self.late.freed(row, len(self.events) - 1)
        if self.early.free_from:
            self.early.freed(row, len(self.events) - 1)

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
            phase, step = self._marked[1], self.step
            self.events.append(
                (time.perf_counter_ns() - self._epoch, action, address, size, phase, step, -1, -1, -1, 0, -1, _UNKNOWN)
            )

    def out_of_memory(self, size: int, func: Any, args: Any, tensor: str = "", stream: int = 0) -> None:
        """Record a request that did not fit."""
        phase, module, stack, grad, _ = self._attribution(func, args, 0)
        self.tensors[len(self.events)] = tensor
        if stream:
            self.streams[len(self.events)] = stream
        now = time.perf_counter_ns() - self._epoch
        number = self._know(func)[0]
        self.events.append((now, _OOM, -1, size, phase, self.step, number, module, stack, grad, -1, _UNKNOWN))

    def _attribution(self, func: Any, args: Any, index: int) -> tuple[int, int, int, int, int]:
        """Phase, module, stack, 1 if gradients are enabled, and open call (-2: in AccumulateGrad) of an op's output."""
        node = current_autograd_node()
        here = self._local.state
        calls = here.calls
        module, call = calls[-1][:2] if calls else (-1, -1)
        grad = here.gradients(node)
        if grad and calls and not torch.is_grad_enabled():
            call = calls[-1][4]
        if node is None or here.in_backward:
            phase = here.phase
            if phase == _OPTIMIZER:
                module = self.owner_of_argument(args, index, module)
            elif phase == _OTHER and grad and not calls and needs_gradient(args):
                phase = here.phase = _FORWARD
                self._step_begins(here)
            elif phase == _BACKWARD:
                phase = here.phase = _OTHER
            stack = self._stack_now(here)
        else:
            phase = here.phase = _BACKWARD
            sequence = sequence_number_of(node)
            if grad and (calls or sequence == _ACCUMULATE or here.stack >= 0):
                # A checkpoint recomputes its forward in backward: the frames of the forward are running.
                stack = self._stack_now(here)
            elif sequence == _ACCUMULATE:
                module, stack, call = self.owner_of(node.variable), -1, -2
            else:
                module, stack = self._made_by(node, sequence, module)
        if (self.step, phase) != self._marked and self._threads.leads(here, phase == _BACKWARD):
            self._mark_before_segments(phase)
        return phase, module, stack, int(grad), call

    def _stack_now(self, here: ThreadState) -> int:
        if here.stack < 0:
            here.stack = self.stacks.number(caller(4))
        return here.stack

    def _made_by(self, node: Any, sequence: int, module: int) -> tuple[int, int]:
        """Module and stack of the forward op that made the running autograd node."""
        states = self._threads.states
        if len(states) == 1:
            made_by = states[0].forwards.get(sequence)
            return (module, -1) if made_by is None else made_by[:2]
        entries = [entry for state in states if (entry := state.forwards.get(sequence)) is not None]
        if not entries:
            return module, -1
        if len(entries) > 1:
            # Sequence numbers count per thread, and recomputation may run in another: the op's name decides.
            name = node.name().lower()
            entries.sort(key=lambda entry: not name.startswith(str(entry[2]).split(".")[1].strip("_").replace("_", "")))
        return entries[0][0], entries[0][1]

    def _know(self, func: Any) -> tuple[int, bool, Any]:
        number = self.ops.setdefault(op_name(func), len(self.ops))
        known = self._known_ops[id(func)] = number, func in COPYING, func
        return known

    def _mark(self, phase: int) -> None:
        self._marked = (self.step, phase)
        now = time.perf_counter_ns() - self._epoch
        self.events.append((now, _MARK, -1, 0, phase, self.step, -1, -1, -1, 0, -1, _UNKNOWN))

    def _mark_before_segments(self, phase: int) -> None:
        """Mark a phase that begins with a request, before the segments that the allocator got for the request."""
        events = self.events
        end = start = len(events)
        while start and events[start - 1][1] in _NEW_SEGMENT:
            start -= 1
        segments = events[start:]
        del events[start:]
        self._mark(phase)
        events += [(*event[:4], phase, self.step, *event[6:]) for event in segments]
        for row in range(end, start, -1):
            if row - 1 in self.streams:
                self.streams[row] = self.streams.pop(row - 1)

    def _step_begins(self, here: ThreadState) -> None:
        if self._threads.leads(here, trains=True) and self._step_ended:
            self._step_ended = False
            self.step += 1
            for state in self._threads.states:
                state.forwards.clear()

    # -- called by the module and optimizer hooks

    def call_begins(self, module: torch.nn.Module, args: Any, frame: FrameType | None) -> None:
        """Record that a module is called."""
        here, node = self._threads.here, current_autograd_node()
        calls = here.calls
        applied = here.gradients(node) and not torch.is_grad_enabled()
        if not calls:
            if self.on_model_call is not None:
                self.on_model_call(module, args, frame)
            self.names.root(module)
            if node is None:
                self.tag_model(module)
                if self.training is not None:
                    self.training.called(module)
                here.in_backward = False
                here.phase = _FORWARD
                if self._threads.leads_call(here, module):
                    self._step_begins(here)
                    if self._marked != (self.step, _FORWARD):
                        self._mark(_FORWARD)
                for value in args:
                    self.tag_input(value)
        number = self.names.number(module, calls[-1][0] if calls else -1)
        call = len(self.call_ends_at)
        self.call_ends_at.append(-1)
        outside = (calls[-1][4] if calls else -1) if applied else call
        calls.append((number, call, self.stacks.enter(frame), id(module), outside))

    def call_ends(self, module: torch.nn.Module) -> None:
        """Record that a module returned or raised."""
        here = self._threads.here
        while here.calls:
            _, call, before, identity, _ = here.calls.pop()
            self.call_ends_at[call] = len(self.events)
            self.stacks.leave(before)
            if identity == id(module):
                break
        if self.uninitialized and not here.calls:
            self.uninitialized = False
            self.tag_model(module)
        if not here.calls and here.phase == _FORWARD and not here.gradients(None):
            here.phase = _OTHER

    def optimizer_begins(self, optimizer: torch.optim.Optimizer, frame: FrameType | None = None) -> None:
        """Record that an optimizer is about to step; `frame` calls it."""
        if self.training is not None:
            self.training.stepped(optimizer)
        here = self._threads.here
        self._leave_optimizer(here)
        if frame is not None:
            here.optimizer = self.stacks.enter_line(frame)
        here.in_backward = current_autograd_node() is not None
        if not here.in_backward:
            self._step_begins(here)
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                self.tag_weight(parameter)
        self.tag_state(optimizer)
        here.phase = _OPTIMIZER
        if self._threads.leads(here, trains=True):
            self._mark(_OPTIMIZER)

    def optimizer_ends(self, optimizer: torch.optim.Optimizer) -> None:
        """Record that an optimizer has stepped."""
        self.tag_state(optimizer)
        here = self._threads.here
        self._leave_optimizer(here)
        here.phase = _BACKWARD if here.in_backward else _OTHER
        here.in_backward = False
        if self._threads.leads(here, trains=True):
            self._step_ended = True
            self._mark(here.phase)

    def _leave_optimizer(self, here: ThreadState) -> None:
        if here.optimizer is not None:
            self.stacks.leave(here.optimizer)
            here.optimizer = None

    def finish(self) -> None:
        """Close the calls that an exception left open."""
        for call in self._threads.close_calls():
            self.call_ends_at[call] = len(self.events)
