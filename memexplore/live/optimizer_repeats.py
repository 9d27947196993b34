"""Take the rows of an optimizer's step on the CPU from earlier equal steps, instead of recording them op by op.

What an optimizer of torch allocates in a step depends on its options and its parameters, not on their values. Once two
recorded steps with the same options and parameters have made the same requests, a third one runs without the dispatch
mode and gets their rows: on the CPU most ops of a small model's step are the optimizer's.
"""

from __future__ import annotations

import functools
import inspect
import time
import weakref
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import torch

from memexplore.recorder.events import LISTS, Event
from memexplore.recorder.recorder import Recorder
from memexplore.recorder.stacks import StackTables
from memexplore.tape import Action
from memexplore.torch_internals.dispatch import function_modes
from memexplore.torch_internals.state import (
    OPTIMIZER_HOOKS,
    OPTIMIZER_POST_HOOKS,
    OPTIMIZER_PRE_HOOKS,
    dispatch_mode_stack,
)

_KINDS = (torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW)
"""Optimizers whose requests do not depend on values; RAdam's depend on the number of the step."""
_FREE_OPTIONS = ("params", "lr", "initial_lr")
"""Options of a group that may change from step to step."""
_EQUAL_STEPS = 2
_MOST_REPEATS = 20
"""Steps after which one is recorded again, and compared."""
_PLAIN = (bool, int, float, str)
_ALLOC, _FREE = int(Action.ALLOC), int(Action.FREE_REQUESTED)
_SIZE = Event._fields.index("size")
_Tensor, _Parameter = torch.Tensor, torch.nn.Parameter
_clock = time.perf_counter_ns


class _Request(NamedTuple):
    """A row of an optimizer's step: without time and address, which differ from step to step."""

    action: int
    size: int
    block: int
    """Position of the row of the block that is freed, -1 of an allocation."""
    phase: int
    op: str
    module: str
    stack: int
    grad: int
    category: int
    tensor: str


class _Place(NamedTuple):
    """What `_Request` leaves out."""

    part: float
    """Part of the step's time that had passed."""
    address: int


class Repeat(NamedTuple):
    """A step that was not recorded, and how `complete` writes its rows from the rows of a recorded step."""

    requests: list[_Request]
    places: list[_Place]
    first: int
    """Its first row."""
    begin: int
    """Its beginning on the clock of the recording."""
    took: int
    shift: int
    """What to add to the addresses."""
    step: int


class _Steps:
    """The recorded steps of one optimizer with one key."""

    def __init__(self, key: Any, tables: StackTables) -> None:
        self.key = key
        self.tables = tables
        """The tables of the stacks of `requests`."""
        self.requests: list[_Request] = []
        self.places: list[_Place] = []
        self.rows: list[tuple[int, ...]] = []
        """The rows of a step that repeats, until `complete` writes the missing numbers."""
        self.used: list[tuple[int, int]] = []
        """The ranges of addresses of these places."""
        self.equal = 0
        """Recorded steps in sequence that made the same requests."""
        self.repeats = 0
        """Steps since then that were not recorded."""

    @property
    def may_repeat(self) -> bool:
        """Whether the next step need not be recorded."""
        return self.equal >= _EQUAL_STEPS and self.repeats < _MOST_REPEATS


class OptimizerRepeats:
    """The optimizers of a watched run whose steps may repeat. None of them, and no tensor, is kept alive."""

    def __init__(self) -> None:
        self._known: weakref.WeakKeyDictionary[torch.optim.Optimizer, _Steps] = weakref.WeakKeyDictionary()
        self._differ: weakref.WeakSet[torch.optim.Optimizer] = weakref.WeakSet()
        """Optimizers that made different requests in two steps with one key."""
        self._began: tuple[_Steps, bool, int, int] | None = None
        """The steps of the optimizer that steps now, whether it repeats them, its first row and its time."""

    def begin(self, recorder: Recorder, mode: Any, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> bool:
        """Note that an optimizer is about to step with some arguments; return whether `mode` need not see its ops."""
        self._began = None
        if optimizer in self._differ or len(args) != 1 or kwargs or not _is_known(optimizer, mode):
            return False
        key = _key(optimizer, recorder)
        if key is None:
            return False
        steps, tables = self._known.get(optimizer), recorder.stacks.tables
        if steps is None or steps.key != key or steps.tables is not tables:
            steps = self._known[optimizer] = _Steps(key, tables)
        repeats = steps.may_repeat
        self._began = steps, repeats, len(recorder.events), _clock()
        return repeats

    def end(self, recorder: Recorder, optimizer: torch.optim.Optimizer) -> Repeat | None:
        """Note that the optimizer has stepped, and keep the rows of its step.

        Return the step for `complete` where it repeats another one.
        """
        began, self._began = self._began, None
        if began is None:
            return None
        steps, repeats, first, start = began
        if repeats:
            steps.repeats += 1
            return _repeat(recorder, steps, start)
        recorder.settle()
        read = _read(recorder, first, start)
        if read is None:
            steps.equal = 0
            return None
        if steps.equal and read[0] != steps.requests:
            self._differ.add(optimizer)
        steps.requests, steps.places = read
        pairs = zip(steps.requests, steps.places, strict=True)
        steps.used = _united((place.address, place.address + request.size) for request, place in pairs)
        steps.rows = [
            (0, own.action, 0, own.size, own.phase, 0, -1, -1, own.stack, own.grad, -1, own.category)
            for own in steps.requests
        ]
        steps.equal, steps.repeats = steps.equal + 1, 0
        return None


def complete(recorder: Recorder, repeats: Iterable[Repeat]) -> None:
    """Write the rows of steps that were not recorded, in place of the rows that `OptimizerRepeats.end` has added."""
    events, ops, tensors = recorder.events, recorder.ops, recorder.tensors
    for requests, places, first, begin, took, shift, step in repeats:
        for row, (request, place) in enumerate(zip(requests, places, strict=True), first):
            action, size, block, phase, op, module, stack, grad, category, tensor = request
            if action == _ALLOC:
                tensors[row] = tensor
            number = ops.setdefault(op, len(ops)) if op else -1
            owner = recorder.names.intern(module) if module else -1
            now, address = begin + int(place.part * took), place.address + shift
            freed = first + block if action == _FREE else -1
            events[row] = (now, action, address, size, phase, step, number, owner, stack, grad, freed, category)


def _is_known(optimizer: torch.optim.Optimizer, mode: Any) -> bool:
    """Return whether all code of an optimizer's step is torch's, and only `mode` sees its ops."""
    kind = type(optimizer)
    return (
        kind in _KINDS
        and _is_of_torch(kind.step)
        and not any(getattr(optimizer, name) for name in OPTIMIZER_HOOKS)
        and len(OPTIMIZER_PRE_HOOKS) == len(OPTIMIZER_POST_HOOKS) == 1
        and not function_modes()
        and dispatch_mode_stack() == [mode]
    )


@functools.lru_cache(maxsize=100)
def _is_of_torch(step: Callable[..., Any]) -> bool:
    return inspect.unwrap(step).__module__.startswith("torch.optim.")


def _key(optimizer: torch.optim.Optimizer, recorder: Recorder) -> Any:
    """Return what decides the requests of a step, None where it cannot be said."""
    here = recorder.local.state
    if here.calls or here.in_backward or getattr(optimizer, "grad_scale", None) is not None:
        return None
    key: list[Any] = [recorder.stacks.outer_number]
    for group in optimizer.param_groups:
        options = [(name, value) for name, value in group.items() if name not in _FREE_OPTIONS]
        if not all(_is_plain(value) for _, value in options):
            return None
        key += (*options, type(group["lr"]))
        for parameter in group["params"]:
            grad = parameter.grad
            if type(parameter) is not _Parameter or not (grad is None or type(grad) is _Tensor):
                return None
            key += (id(parameter), parameter.shape, parameter.dtype)
            key.append(None if grad is None else (grad.layout, grad.stride()))
    for parameter, state in optimizer.state.items():
        key += (id(parameter), *(map(id, state.values()) if isinstance(state, dict) else (id(state),)))
    return key


def _is_plain(value: Any) -> bool:
    """Return whether an option is a plain value or holds plain values only: a key would keep a tensor alive."""
    return all(map(_is_plain, value)) if isinstance(value, LISTS) else value is None or isinstance(value, _PLAIN)


def _read(recorder: Recorder, first: int, start: int) -> tuple[list[_Request], list[_Place]] | None:
    """Return the rows from `first` on of a step that began at a time, None if it left or freed a block."""
    end = len(recorder.events)
    ops, modules, took = list(recorder.ops), recorder.names.table, max(_clock() - start, 1)
    requests: list[_Request] = []
    places: list[_Place] = []
    alive: set[int] = set()
    for row in range(first, end):
        event = Event(*recorder.events[row])
        block = event.call
        if event.action == _FREE and block in alive:
            alive.remove(block)
        elif event.action == _ALLOC and block < 0 and row not in recorder.tags.categories:
            alive.add(row)
        else:
            return None
        requests.append(
            _Request(
                event.action,
                event.size,
                block - first if event.action == _FREE else -1,
                event.phase,
                ops[event.op] if event.op >= 0 else "",
                modules[event.module] if event.module >= 0 else "",
                event.stack,
                event.grad,
                event.category,
                recorder.tensors.get(row, ""),
            )
        )
        places.append(_Place((event.time + recorder.epoch - start) / took, event.address))
    return None if alive else (requests, places)


def _repeat(recorder: Recorder, steps: _Steps, start: int) -> Repeat:
    """Add the rows of a step that began at a time; `complete` writes what differs from the recorded one."""
    began, took = start - recorder.epoch, _clock() - start
    first, shift = len(recorder.events), _shift(recorder, steps)
    recorder.events += steps.rows
    return Repeat(steps.requests, steps.places, first, began, took, shift, recorder.step)


def _shift(recorder: Recorder, steps: _Steps) -> int:
    """Return what to add to the addresses of an earlier step, so that its blocks overlap no block allocated now."""
    events, used = recorder.events, steps.used
    if not used:
        return 0
    lowest, highest = used[0][0], used[-1][1]
    for address, row in recorder.open_rows.items():
        end = address + events[row][_SIZE]
        if address < highest and end > lowest and any(address < last and end > first for first, last in used):
            return max(address + events[row][_SIZE] for address, row in recorder.open_rows.items()) - lowest
    return 0


def _united(blocks: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    """Return the ranges that blocks cover, given as first and last address.

    >>> _united([(8, 10), (0, 4), (2, 6)])
    [(0, 6), (8, 10)]
    """
    ranges: list[tuple[int, int]] = []
    for first, last in sorted(blocks):
        if ranges and first <= ranges[-1][1]:
            ranges[-1] = ranges[-1][0], max(last, ranges[-1][1])
        else:
            ranges.append((first, last))
    return ranges
