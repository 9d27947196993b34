"""Record the rows of a run: what its ops, module calls and optimizer steps allocate and free.

Each row has the op, module, phase, step and stack; `tape_builder` decides the categories afterwards.
"""

from __future__ import annotations

import contextlib
import gc
import time
import weakref
from collections import deque
from collections.abc import Callable, Mapping
from types import FrameType
from typing import Any

import torch

from memexplore.recorder.communication import Communication, is_followed, makes_bucket
from memexplore.recorder.copies import COPY, COPYING, Copies
from memexplore.recorder.cpu_training import CpuTraining
from memexplore.recorder.events import LISTS, Origin, needs_gradient, op_name
from memexplore.recorder.module_hooks import Names
from memexplore.recorder.stacks import Stacks, caller, shared_tables
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
from memexplore.virtual_gpu.dispatch.interrupts import uninterrupted

_clock, _is_grad_enabled = time.perf_counter_ns, torch.is_grad_enabled  # bound once, because each block needs them
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


class Recorder:
    """The rows of one recording, tuples in the order of `Event`; no tensor is kept.

    `live` maps a storage's C++ address to its `Ref`; the dispatch mode that runs the ops updates it. `adopt` makes the
    `Ref` of a storage older than the recording; None if `live` has all storages.
    """

    def __init__(self, live: dict[int, Any], adopt: Callable[[torch.Tensor], Any] | None = None) -> None:
        self.live = live
        self.events: list[tuple[int, ...]] = []
        self.ops: dict[str, int] = {}
        self.names = Names()
        self.stacks = Stacks(shared_tables())
        self.tensors: dict[int, str] = {}
        """Row -> shape and dtype of the tensor that the block was allocated for (`tensor_text`), empty if unknown."""
        self.workspaces: dict[int, tuple[int, ...]] = {}
        """Row -> sizes of the workspace that may be requested behind it (`possible_workspace`)."""
        self.streams: dict[int, int] = {}
        """Row -> stream of a block or segment, without the default stream."""
        self.open_rows: dict[int, int] = {}
        """Address -> row of the block that is alive there."""
        self.tags = Tags(live, self.open_rows, self.names, adopt)
        self.copies = Copies(live, self.open_rows)
        self.communication = Communication(self.tags.row_of, self.tags.categories)
        self.late, self.early = LateFrees(), EarlyFrees()
        self.step = 0
        self.marked = (0, _OTHER)
        """Step and phase of the last mark."""
        self._step_ended = True
        self.dead: deque[Any] = deque()
        """The `Ref`s of storages that have died since the last row; `settle` writes their rows."""
        self.kept: set[int] = set()
        """Rows of blocks that earlier steps of the run left, and that nothing has shown to be inputs."""
        self.call_ends_at: list[int] = []
        """Call number -> number of events when it ended, -1 while it is open."""
        self._known_ops: dict[int, tuple[int, bool, Any]] = {}
        """Id of an op -> its number, whether it copies, and the op, whose own hash takes longer."""
        self._telling_ops: dict[int, tuple[bool, Any]] = {}
        """Id of an op -> whether it tells what its arguments are, and the op."""
        self._threads = Threads()
        self.local = self._threads.local
        self.training: CpuTraining | None = CpuTraining()
        """None where the CPU itself is recorded."""
        self.epoch = _clock()

    # -- called by the dispatch mode

    def op(self, func: Any, args: Any, depth: int = 3) -> None:
        """Record that an op is about to run: module and stack of the autograd node that its forward just created.

        `args` has the keyword arguments at its end. The dispatch mode's own frame is `depth` calls above this one; the
        stack begins there.
        """
        here = self.local.state
        here.stack = -2
        sequence = next_sequence_number()
        if sequence != here.sequence:
            self.made_node(here, sequence, func, depth + 1)
        telling = self._telling_ops.get(id(func))
        if telling is None:
            telling = self._telling_ops[id(func)] = tells_about_arguments(func), func
        if telling[0]:
            self.tag_arguments(here, func, args)
        if self.kept:
            self.reads(here, args)

    def made_node(self, here: ThreadState, sequence: int, func: Any, depth: int) -> None:
        """Note module and stack of the autograd node before a sequence number, which the forward of an op has made."""
        here.sequence = sequence
        here.stack = stack = self.stacks.number(caller(depth))
        calls = here.calls
        here.forwards[sequence - 1] = (calls[-1][0] if calls else -1, stack, func)

    def reads(self, here: ThreadState, args: Any) -> None:
        """Note the arguments of an op: what a forward pass reads with a tensor that requires a gradient is an input."""
        if here.phase in (_FORWARD, _OTHER) and _is_grad_enabled() and needs_gradient(args):
            self.are_inputs(args)

    def are_inputs(self, values: Any) -> None:
        """Note that tensors, also in lists and mappings, are inputs, although an earlier step may have made them."""
        for value in values.values() if isinstance(values, Mapping) else values:
            if isinstance(value, torch.Tensor):
                if self.kept:
                    self.kept.discard(self.tags.row_of(value))
            elif isinstance(value, (*LISTS, Mapping)):
                self.are_inputs(value)

    def tag_arguments(self, here: ThreadState, func: Any, args: Any) -> None:
        """Tag the arguments of an op that `tells_about_arguments` as gradients, copies or blocks of communication."""
        if func is _DETACH:
            node = current_autograd_node()
            if node is not None and sequence_number_of(node) == _ACCUMULATE:
                # AccumulateGrad detaches the incoming gradient to keep it: accumulate_grad.h.
                self.tags.tag(args[0], Category.GRADIENT, self.tags.owner_of(node.variable))
        elif func is COPY:
            if not here.calls:
                self.copies.copied(*args[:2])
        else:
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
        number, copies, _ = self._known_ops.get(id(func)) or self._register_op(func)
        row = self.open_rows[address] = len(self.events)
        self.tensors[row] = tensor
        if stream:
            self.streams[row] = stream
        if category == _UNKNOWN and phase == _BACKWARD and call == -2:
            self.tags.categories[row] = Category.GRADIENT
            call = -1
        elif copies and call < 0 and phase in (_OTHER, _FORWARD):
            self.copies.computed(row, args, size)
        elif func is _EMPTY and is_initialized() and makes_bucket():
            # Beside the buckets the Reducer sends numbers: which parameter is in which bucket, and which are used.
            kind = Category.COMMUNICATION_BUFFER if tensor.startswith("int") else Category.GRADIENT_BUCKET
            self.tags.categories[row] = kind
        now = _clock() - self.epoch
        self.events.append((now, _ALLOC, address, size, phase, self.step, number, module, stack, grad, call, category))

    def possible_workspace(self, address: int, sizes: tuple[int, ...]) -> None:
        """Record that a workspace may be requested behind the block at an address, of one of some sizes in bytes.

        Its size is an estimate, and the program requests the first; 0 is no workspace.
        """
        self.workspaces[self.open_rows[address]] = sizes

    def out_of_memory(self, size: int, func: Any, args: Any, tensor: str = "", stream: int = 0) -> None:
        """Record a request that did not fit."""
        phase, module, stack, grad, _ = self._attribution(func, args, 0)
        self.tensors[len(self.events)] = tensor
        if stream:
            self.streams[len(self.events)] = stream
        now = _clock() - self.epoch
        number = self._register_op(func)[0]
        self.events.append((now, _OOM, -1, size, phase, self.step, number, module, stack, grad, -1, _UNKNOWN))

    def _attribution(self, func: Any, args: Any, index: int) -> tuple[int, int, int, int, int]:
        """Phase, module, stack, 1 if gradients are enabled, and open call (-2: in AccumulateGrad) of an op's output."""
        node = current_autograd_node()
        here = self.local.state
        calls = here.calls
        module, call = calls[-1][:2] if calls else (-1, -1)
        grad = _is_grad_enabled()
        if grad:
            here.enabled = True
        else:
            grad = here.without_gradients(node)
            if grad and calls:
                call = calls[-1][4]
        if node is None or here.in_backward:
            phase, module = self._outside_backward(here, args, index, module, bool(grad))
            stack = self._stack_now(here)
        else:
            phase = here.phase = _BACKWARD
            sequence = sequence_number_of(node)
            if grad and (calls or sequence == _ACCUMULATE or here.stack >= 0):
                # A checkpoint recomputes its forward in backward: the frames of the forward are running.
                stack = self._stack_now(here)
            elif sequence == _ACCUMULATE:
                module, stack, call = self.tags.owner_of(node.variable), -1, -2
            else:
                module, stack = self._made_by(node, sequence, module)
        marked = self.marked
        if phase != marked[1] or self.step != marked[0]:
            threads = self._threads
            leads = threads.leads_backward(here) if phase == _BACKWARD else threads.leads(here, trains=False)
            if leads:
                self.mark_before_segments(phase)
        return phase, module, stack, int(grad), call

    def _outside_backward(self, here: ThreadState, args: Any, index: int, module: int, grad: bool) -> tuple[int, int]:
        """Return phase and module of an op that the autograd engine has not called; the phase may begin with it."""
        if here is self._threads.lender:
            self._threads.return_to(here)
        phase = here.phase
        if phase == _OPTIMIZER:
            return phase, self.tags.owner_of_argument(args, index, module)
        if phase == _OTHER and grad and not here.calls and needs_gradient(args):
            phase = here.phase = _FORWARD
            self._step_begins(here)
        elif phase == _BACKWARD:
            phase = here.phase = _OTHER
        return phase, module

    def place(self, func: Any, args: Any) -> tuple[int, int, int]:
        """Return op, module and stack of a running op that gives no block a row; no phase begins with it."""
        node = current_autograd_node()
        here = self.local.state
        calls = here.calls
        module = calls[-1][0] if calls else -1
        number = (self._known_ops.get(id(func)) or self._register_op(func))[0]
        if node is None or here.in_backward:
            if here.phase == _OPTIMIZER:
                module = self.tags.owner_of_argument(args, 0, module)
            return number, module, self._stack_now(here)
        if calls or here.stack >= 0:
            return number, module, self._stack_now(here)
        sequence = sequence_number_of(node)
        if sequence == _ACCUMULATE:
            return number, self.tags.owner_of(node.variable), -1
        return number, *self._made_by(node, sequence, module)

    def _stack_now(self, here: ThreadState) -> int:
        if here.stack < 0:
            here.stack = self.stacks.number(caller(4))
        return here.stack

    def _made_by(self, node: Any, sequence: int, module: int) -> tuple[int, int]:
        """Module and stack of the forward op that made the running autograd node."""
        states = self._threads.states
        if len(states) == 1:
            made_by = states[0].made_by(node, sequence)
            return (module, -1) if made_by is None else made_by[:2]
        entries = [entry for state in states if (entry := state.made_by(node, sequence)) is not None]
        if not entries:
            return module, -1
        if len(entries) > 1:
            # Sequence numbers count per thread, and recomputation may run in another: the op's name decides.
            name = node.name().lower()
            entries.sort(key=lambda entry: not name.startswith(str(entry[2]).split(".")[1].strip("_").replace("_", "")))
        return entries[0][0], entries[0][1]

    def _register_op(self, func: Any) -> tuple[int, bool, Any]:
        number = self.ops.setdefault(op_name(func), len(self.ops))
        entry = self._known_ops[id(func)] = number, func in COPYING, func
        return entry

    def _step_begins(self, here: ThreadState) -> None:
        if self._threads.leads(here, trains=True) and self._step_ended:
            self._step_ended = False
            self.step += 1
            for state in self._threads.states:
                state.forget_forwards()

    # -- rows that no op writes: older blocks, frees, streams, segments and marks

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
            registered: Any = live.get(ref.key)
            if registered is ref:
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

    def tag_at(self, address: int) -> tuple[int | None, int | None]:
        """Return the certain category and the module of the block at an address."""
        return self.tags.tag_at(address)

    def tag_block(self, address: int, tag: tuple[int | None, int | None]) -> None:
        """Give the block at an address what `tag_at` returned for another block."""
        self.tags.tag_block(address, tag)

    def tag_model(self, root: torch.nn.Module) -> None:
        """Tag the storages of a model that moved to the device."""
        self.tags.tag_model(root)

    # -- called by the module and optimizer hooks

    def call_begins(self, module: torch.nn.Module, args: Any, frame: FrameType | None) -> None:
        """Record that a module is called."""
        self.settle()
        here, node = self._threads.here, current_autograd_node()
        calls = here.calls
        applied = here.gradients(node) and not torch.is_grad_enabled()
        if not calls:
            self.names.root_called_by(module, frame)
            if node is None:
                if here is self._threads.lender:
                    self._threads.return_to(here)
                self.tags.tag_model(module)
                if self.training is not None:
                    self.training.called(module)
                here.in_backward = False
                here.phase = _FORWARD
                if self._threads.leads_call(here, module):
                    self._step_begins(here)
                    # Also behind another forward pass: the calls of a loop in one line are told apart by it.
                    self.mark(_FORWARD)
                for value in args:
                    self.tags.tag_input(value)
        number = self.names.number(module, calls[-1][0] if calls else -1)
        call = len(self.call_ends_at)
        self.call_ends_at.append(-1)
        outside = (calls[-1][4] if calls else -1) if applied else call
        calls.append((number, call, self.stacks.enter(frame), id(module), outside))

    def call_ends(self, module: torch.nn.Module) -> None:
        """Record that a module returned or raised."""
        self.settle()
        here = self._threads.here
        while here.calls:
            _, call, before, identity, _ = here.calls.pop()
            self.call_ends_at[call] = len(self.events)
            self.stacks.leave(before)
            if identity == id(module):
                break
        if self.tags.uninitialized and not here.calls:
            self.tags.uninitialized = False
            self.tags.tag_model(module)
        if not here.calls and here.phase == _FORWARD and not here.gradients(None):
            here.phase = _OTHER

    def optimizer_begins(self, optimizer: torch.optim.Optimizer, frame: FrameType | None = None) -> None:
        """Record that an optimizer is about to step; `frame` calls it."""
        self.settle()
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
                self.tags.tag_weight(parameter)
        self.tags.tag_state(optimizer)
        here.stepping = weakref.ref(optimizer)
        here.phase = _OPTIMIZER
        if self._threads.leads(here, trains=True):
            self.mark(_OPTIMIZER)

    def optimizer_ends(self, optimizer: torch.optim.Optimizer) -> None:
        """Record that an optimizer has stepped."""
        self.settle()
        self.tags.tag_state(optimizer)
        here = self._threads.here
        self._leave_optimizer(here)
        here.stepping = None
        here.phase = _BACKWARD if here.in_backward else _OTHER
        here.in_backward = False
        if self._threads.leads(here, trains=True):
            self._step_ended = True
            for state in self._threads.states:
                state.step_from = state.sequence
            self.mark(here.phase)

    def _leave_optimizer(self, here: ThreadState) -> None:
        if here.optimizer is not None:
            self.stacks.leave(here.optimizer)
            here.optimizer = None

    def tag_unfinished_steps(self) -> None:
        """Tag the state that optimizers have made in a step that an exception ended.

        Call it while the exception is handled: its frames may be the last that keep the optimizer.
        """
        self.settle()
        for state in self._threads.states:
            optimizer = state.stepping() if state.stepping is not None else None
            if optimizer is not None:
                self.tags.tag_state(optimizer)

    def tag_states(self) -> None:
        """Tag the recorded state of all optimizers, such as one that was loaded and has not stepped yet.

        Call it while the exception that ends the program is handled.
        """
        self.settle()
        for value in gc.get_objects():
            # The object is not asked, as that may run the user's code.
            if issubclass(type(value), torch.optim.Optimizer) and isinstance(vars(value).get("state"), dict):
                # A class of the user may compute its attributes, and a weight may have no storage: the program's own
                # error counts.
                with contextlib.suppress(Exception):
                    self.tags.tag_recorded_state(value)

    def finish(self) -> None:
        """Close the calls and the steps of optimizers that an exception left open."""
        self.tag_unfinished_steps()
        for call in self._threads.close_calls():
            self.call_ends_at[call] = len(self.events)


def tells_about_arguments(func: Any) -> bool:
    """Return whether `Recorder.tag_arguments` looks at an op."""
    return func is _DETACH or func is COPY or is_followed(func)
