"""Number the ops of a recording, so that the stacks of the allocator's history name the op of each request.

Each op runs in a frame of its own, whose line is the number of the op modulo `COUNT`. The allocator's history has the
frames of Python, so each of its requests names the op that was running, also in the backward pass, where the stack has
no other frame.
"""

from __future__ import annotations

import functools
import itertools
import os
import sys
from array import array
from collections.abc import Callable, Sequence
from types import FrameType, FunctionType
from typing import Any, NamedTuple

from memexplore.recorder.recorder import Recorder
from memexplore.recorder.tape_builder import OWN
from memexplore.tape import Frame
from memexplore.torch_internals.dispatch import schema_or_none

COUNT = 256
"""Numbers that the lines tell apart."""
_FIRST_LINE = 1_000_000


def _run(run: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    return run(*args, **kwargs) if kwargs else run(*args)


_RUNNERS = tuple(
    FunctionType(_run.__code__.replace(co_firstlineno=_FIRST_LINE + 2 * number), globals()) for number in range(COUNT)
)


def number_of(filename: str, line: int | None) -> int:
    """Return the number that a frame of a stack tells, from 0 to `COUNT` - 1, or -1 for any other frame."""
    return (line - _FIRST_LINE) // 2 if line and line > _FIRST_LINE and filename == _run.__code__.co_filename else -1


def other_files() -> tuple[str, ...]:
    """Return the beginnings of the paths of all files of memexplore but this one."""
    this = _run.__code__.co_filename
    folder = os.path.dirname(this)
    files = [os.path.join(folder, name) for name in os.listdir(folder)]
    packages = [path for path in map(OWN[0].__add__, os.listdir(OWN[0])) if path != folder]
    return (*packages, *(path for path in files if path != this))


def running() -> Frame | None:
    """Return the frame of the innermost numbered op that the calling thread runs, None without one."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and number_of(frame.f_code.co_filename, frame.f_lineno) < 0:
        frame = frame.f_back
    return None if frame is None else Frame(frame.f_code.co_filename, frame.f_lineno, frame.f_code.co_name)


class Quiet(NamedTuple):
    """Op and module, as positions in the tables of the recorder, and stack of an op without new outputs."""

    op: int
    module: int
    stack: tuple[Frame, ...]


class OpNumbers:
    """The numbers of the ops of one recording."""

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder
        self._next = itertools.count().__next__
        self.of_requests = array("q")
        """The number of the op of each recorded alloc and oom row, in their order."""
        self._quiet: dict[int, tuple[int, int, int]] = {}
        self._is_quiet: dict[int, tuple[bool, Any]] = {}
        """Id of an op -> whether it returns no new tensor, and the op."""

    def begin(self, run: Callable[..., Any], func: Any, args: Any) -> Callable[..., Any]:
        """Note an op that is about to run, and return what runs it as `run` does, with its arguments as two values."""
        number = self._recorder.local.state.op_number = self._next()
        quiet = self._is_quiet.get(id(func))
        if quiet is None:
            quiet = self._is_quiet[id(func)] = _returns_nothing_new(func), func
        if quiet[0]:
            self._quiet[number] = self._recorder.place(func, args)
        return functools.partial(_RUNNERS[number % COUNT], run)

    def noting(self, write: Callable[..., None]) -> Callable[..., None]:
        """Return a function that writes the row of a request, which also notes the running op of the calling thread."""

        def noted(*args: Any) -> None:
            self.of_requests.append(self._recorder.local.state.op_number)
            write(*args)

        return noted

    @property
    def last_quiet(self) -> int:
        """The number of the last op that returned no new tensor, -1 without one."""
        return max(self._quiet, default=-1)

    def quiet(self, numbers: Sequence[int]) -> Quiet | None:
        """Return the last op of some numbers that returned no new tensor, None if there is none."""
        for number in reversed(numbers):
            quiet = self._quiet.get(number)
            if quiet is not None:
                op, module, stack = quiet
                return Quiet(op, module, self._recorder.stacks.resolve(stack, OWN) if stack >= 0 else ())
        return None


def _returns_nothing_new(func: Any) -> bool:
    """Return whether an op writes into its arguments, or returns no tensor, so that no output shows its requests."""
    schema = schema_or_none(func)
    if schema is None:
        return False
    tensors = [value for value in schema.returns if "Tensor" in str(value.type)]
    return all(tensor.alias_info is not None and tensor.alias_info.is_write for tensor in tensors)
