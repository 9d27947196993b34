"""Tell facts about the stacks of a snapshot: Python lines, op, open layer calls, and the origin of a request.

`Stacks` has columns with one entry a stack. A frame counts by its file's path and its
function: a user's file called `optimizer.py` proves nothing, a frame of `torch/optim/optimizer.py` does.
"""

from __future__ import annotations

import enum
import functools
import os
import re
from bisect import bisect_left
from typing import Any, NamedTuple

import numpy as np

from memexplore.snapshot.recorded import Recorded
from memexplore.tape import Category, Frame
from memexplore.text.untrusted import clean_text, shown


class Origin(enum.IntEnum):
    """The part of a training script that requested or freed memory, judged by the stack of the row."""

    NONE = 0
    """The row has no stack."""
    USER = 1
    """Code outside layers, backward and optimizer."""
    FORWARD = 2
    """The call of a layer."""
    BACKWARD = 3
    """The autograd engine."""
    RECOMPUTE = 4
    """The call of a layer inside the autograd engine, as checkpointing makes it."""
    ACCUMULATE = 5
    """The autograd engine while it stores a gradient in `.grad`."""
    OPTIMIZER = 6
    ZERO_GRAD = 7
    MODEL = 8
    """Construction, moving or loading of layers."""
    DATA = 9
    """A DataLoader, or the transfer of its batches to the device."""
    WORKSPACE = 10
    """cuBLAS and cuDNN, for their scratch memory."""


Call = tuple[Any, ...]
"""An open layer call: the lines from the enclosing call to this one, and its `forward`."""

_OP = re.compile(r"at::_ops::(\w+)::call\(")
# at::cuda::getNewWorkspace allocates cuBLAS workspaces; cuDNN's are allocated in the call of a plan, outputs before.
_LIBRARY = re.compile(
    r"at::cuda::(getNewWorkspace|getCUDABlasLtWorkspace|getCurrentCUDABlas)|at::native::(raw_cudnn_|run_conv_plan)"
)
_ENGINE = "torch::autograd::Engine::"
_ACCUMULATE = "torch::autograd::AccumulateGrad"
_MODULE = re.compile(r"(^|/)torch/nn/modules/module\.py$")
_OPTIM = re.compile(r"(^|/)torch/optim/")
_BACKWARD = re.compile(r"(^|/)torch/(autograd/(__init__|graph)|_tensor)\.py$")
_DATA = re.compile(r"(^|/)torch/utils/data/")
_LOADING = re.compile(r"(^|/)(torch/(nn/init|nn/parameter|serialization)|accelerate/utils/modeling)\.py$")
_STEPS_OF_OTHERS = re.compile(r"(^|/)(site|dist)-packages/[^/]*(optim|bitsandbytes|apex|deepspeed|lion|galore)")
_RECORDER = re.compile(r"(^|/)memexplore/recorder/(real_device|op_numbers)\.py$")
"""Files of memexplore that run each op while they record it."""
_BUILDING = {"__init__", "reset_parameters", "load_state_dict", "_load_from_state_dict", "from_pretrained"}
_MOVING = {"_apply", "bfloat16", "convert", "cuda", "double", "float", "half", "to", "to_empty", "type"}
"""Methods of `Module`: a virtual GPU has its own `_apply`, whose frames are not in its snapshots."""
_BATCHES = {"collate_fn", "default_collate", "pin_memory", "send_to_device", "move_data_to_device", "_prepare_inputs"}
_LABEL = re.compile(rf"(?P<op>[^ ]*) ?\((?P<category>{'|'.join(kind.text for kind in Category)})\)")
_CATEGORIES = {kind.text: kind for kind in Category}


class Label(NamedTuple):
    """The op, module and category that `save_snapshot` writes into the first frame of a stack."""

    op: str
    module: str
    category: Category


def parse_label(frame: Frame) -> Label | None:
    """Return the label in a frame that `save_snapshot` wrote, None for any other frame.

    >>> parse_label(Frame("down.0.conv", 0, "aten::convolution (activation)")).module
    'down.0.conv'
    """
    if frame.line != 0:
        return None
    match = _LABEL.fullmatch(frame.function)
    if match is None:
        return None
    return Label(match["op"], "" if frame.filename == "-" else frame.filename, _CATEGORIES[match["category"]])


class _File(NamedTuple):
    """What the path of a frame's file shows."""

    python: bool
    """Whether the frame is a line of Python; the others are C and C++."""
    module: bool
    optim: bool
    backward: bool
    data: bool
    loading: bool
    steps_of_others: bool
    recorder: bool


class _Function(NamedTuple):
    """What the function of a frame shows."""

    last: str
    """The name without its class and module."""
    origin: Origin
    """The origin that a C++ function speaks for; USER where it speaks for none."""


# Texts repeat in many frames, and a hostile file may repeat a long one in every frame.
@functools.lru_cache(maxsize=20_000)
def _file(filename: str) -> _File:
    path = filename.replace(os.sep, "/")
    python = filename.endswith(".py") or filename.startswith("<") or "ipykernel" in filename
    patterns = (_MODULE, _OPTIM, _BACKWARD, _DATA, _LOADING, _STEPS_OF_OTHERS, _RECORDER)
    return _File(python, *(pattern.search(path) is not None for pattern in patterns))


@functools.lru_cache(maxsize=20_000)
def _function(name: str) -> _Function:
    origin = Origin.USER
    if _LIBRARY.search(name) is not None:
        origin = Origin.WORKSPACE
    elif _ACCUMULATE in name:
        origin = Origin.ACCUMULATE
    elif name.startswith(_ENGINE):
        origin = Origin.BACKWARD
    return _Function(name.rpartition(".")[2], origin)


def is_python_frame(frame: Frame) -> bool:
    """Return whether a frame is a line of Python; the others are C and C++."""
    return _file(frame.filename).python


def op_of(stack: tuple[Frame, ...]) -> str:
    """Return the outermost operator in the C++ part of a stack, such as `aten::mm`; empty without one."""
    for frame in reversed(stack):
        match = _OP.match(frame.function)
        if match is not None:
            return f"aten::{match[1]}"
    return ""


def origin_of(stack: tuple[Frame, ...]) -> Origin:
    """Return the origin of a row with this stack, innermost frame first.

    >>> origin_of((Frame("??", 0, "torch::autograd::Engine::evaluate_function(...)"),)).name
    'BACKWARD'
    >>> origin_of((Frame("train.py", 9, "step"), Frame("/env/torch/optim/optimizer.py", 533, "wrapper"))).name
    'OPTIMIZER'
    """
    origins: set[Origin] = set()
    for frame in stack:
        origin = _origin_of_frame(frame)
        if origin in _DECIDING:
            return origin
        # What a layer's own call builds or moves belongs to the call.
        if origin is not Origin.MODEL or Origin.FORWARD not in origins:
            origins.add(origin)
    if Origin.BACKWARD in origins:
        return Origin.RECOMPUTE if Origin.FORWARD in origins else Origin.BACKWARD
    return next((origin for origin in _BY_RANK if origin in origins), Origin.NONE)


_DECIDING = frozenset({Origin.WORKSPACE, Origin.ACCUMULATE, Origin.ZERO_GRAD, Origin.OPTIMIZER})
"""Origins of a frame that are those of the whole stack, whatever the frames around it are."""
_BY_RANK = (Origin.MODEL, Origin.DATA, Origin.FORWARD, Origin.USER)


def _origin_of_frame(frame: Frame) -> Origin:
    """Return the origin that one frame speaks for; USER for a frame of any other code."""
    file, function = _file(frame.filename), _function(frame.function)
    if not file.python:
        return function.origin
    if file.backward and function.last in ("backward", "grad", "_engine_run_backward", "_make_grads"):
        return Origin.BACKWARD
    if function.last == "zero_grad" and (file.optim or file.module):
        return Origin.ZERO_GRAD
    if file.optim or (function.last == "step" and file.steps_of_others):
        return Origin.OPTIMIZER
    if file.module and function.last == "_call_impl":
        return Origin.FORWARD
    if (file.module and function.last in _MOVING) or file.loading or function.last in _BUILDING:
        return Origin.MODEL
    return Origin.DATA if file.data or function.last in _BATCHES else Origin.USER


def calls_of(stack: tuple[Frame, ...]) -> tuple[Call, ...]:
    """Return the open layer calls, outermost first; stacks from the same call sites have equal calls."""
    python = [frame for frame in stack if is_python_frame(frame)][::-1]
    calls: list[Call] = []
    since: list[Frame] = []
    for position, frame in enumerate(python):
        since.append(frame)
        if _function(frame.function).last == "_call_impl" and _file(frame.filename).module:
            # Without the line number of `forward`: the call stays the same while the lines inside it change.
            at = position + 1
            while at < len(python) and _runs_hooks(python[at]):
                at += 1
            calls.append((*since, *((own.filename, own.function) for own in python[at : at + 1])))
            since = []
    return tuple(calls)


def _runs_hooks(frame: Frame) -> bool:
    """Return whether a frame is that of the function inside `Module._call_impl` that runs `forward` between hooks."""
    return _function(frame.function).last == "inner" and _file(frame.filename).module


class Stacks:
    """The stacks of a recorded device; the columns are indexed by the recorded number, their last entry is that of -1.

    `number`, `op` and `module` are positions in `stacks`, `ops` and `modules`; -1 for none. `category` is that of a
    `Label`, -1 without one.
    """

    def __init__(self, recorded: Recorded) -> None:
        self.ops: dict[str, int] = {}
        self.modules: dict[str, int] = {}
        self.stacks: list[tuple[Frame, ...]] = []
        used = {block.stack for segment in recorded.segments for block in segment.blocks}
        used |= set(np.unique(recorded.stack).tolist())
        count = len(recorded.stacks) + 1
        self.number, self.op, self.module, self.category = (np.full(count, -1) for _ in range(4))
        self.origin = np.full(count, int(Origin.NONE))
        self.calls: list[tuple[Call, ...]] = [()] * count
        self.native = False
        """Whether the recording has C++ frames; without them rows of the autograd engine have no stack at all."""
        frames = _Frames()
        prefixes: dict[tuple[int, Call], int] = {}
        self._prefixes: list[tuple[int, ...]] = [()] * count
        """For each stack a number for its outermost call, for its two outermost calls, and so on."""
        numbers: dict[tuple[Frame, ...], int] = {}
        for stack in sorted(used - {-1}):
            stack_frames = tuple(frames.of(frame_number) for frame_number in recorded.stacks[stack])
            stack_frames = tuple(frame for frame in stack_frames if not _file(frame.filename).recorder)
            label = parse_label(stack_frames[0]) if stack_frames else None
            if label is not None:
                stack_frames = stack_frames[1:]
                self.category[stack] = label.category
                self.module[stack] = _number(self.modules, label.module)
            lines = tuple(frame for frame in stack_frames if is_python_frame(frame)) or stack_frames
            self.native = self.native or any(not is_python_frame(frame) for frame in stack_frames)
            if lines not in numbers:
                numbers[lines] = len(self.stacks)
                self.stacks.append(lines)
            self.number[stack] = numbers[lines] if lines or label is None else -1
            self.op[stack] = _number(self.ops, label.op if label is not None else op_of(stack_frames))
            self.origin[stack] = origin_of(stack_frames)
            self.calls[stack] = calls_of(stack_frames)
            number = -1
            path = []
            for call in self.calls[stack]:
                number = prefixes.setdefault((number, call), len(prefixes))
                path.append(number)
            self._prefixes[stack] = tuple(path)

    def common_calls(self, one: int, other: int) -> int:
        """Return the number of outermost layer calls that two stacks have in common."""
        left, right = self._prefixes[one], self._prefixes[other]
        return bisect_left(range(min(len(left), len(right))), True, key=lambda at: left[at] != right[at])


def _number(table: dict[str, int], name: str) -> int:
    """Return the position of a name in a table, which gets it if it is new; -1 for an empty name."""
    return table.setdefault(name, len(table)) if name else -1


class _Frames:
    """Frame dictionaries of a file as Frames; each dictionary and each text is checked once."""

    def __init__(self) -> None:
        self._frames: dict[int, Frame] = {}
        """By the identity of the dictionary, which the file's stacks keep alive."""
        self._texts: dict[str, str] = {}

    def of(self, recorded: Any) -> Frame:
        """Return a frame dictionary as a Frame."""
        frame = self._frames.get(id(recorded))
        if frame is None:
            if type(recorded) is not dict:
                raise ValueError(f"a frame is a dictionary, not {shown(recorded)}")
            filename, line, name = recorded.get("filename"), recorded.get("line"), recorded.get("name")
            if type(filename) is not str or type(line) is not int or type(name) is not str:
                raise ValueError("a frame has a file, a line and a name")
            frame = self._frames[id(recorded)] = Frame(self._text(filename), line, self._text(name))
        return frame

    def _text(self, text: str) -> str:
        clean = self._texts.get(text)
        if clean is None:
            clean = self._texts[text] = clean_text(text)
        return clean
