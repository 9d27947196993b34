"""Intern Python stacks as numbers, and resolve the numbers to frames."""

from __future__ import annotations

import functools
import sys
import threading
from types import CodeType, FrameType
from typing import Any, NamedTuple

from memexplore.tape import Frame
from memexplore.text.untrusted import encodable

_MOST_SHARED = 20_000
DEPTH = 128
"""Frames kept of one stack, innermost first."""


class Outer(NamedTuple):
    """The frame at which the walks through the frames of a thread end."""

    base: int = 0
    """Its id, 0 for none."""
    parent: int = -1
    """The number of the stack from that frame outwards."""
    code: CodeType | None = None
    """Its code: after an exception another frame may have its id."""
    at: int = -1
    """The instruction that it is at, -1 for any."""


class _Walk(threading.local):
    outer = Outer()


class StackTables(NamedTuple):
    """Numbers of stacks, which one recording after another may use: the same lines run in each step."""

    numbers: dict[tuple[Any, ...], int]
    chains: list[tuple[int, tuple[Any, ...]]]
    by_lines: dict[tuple[int, ...], int]
    """Numbers by the lines of the stacks: an instruction that Python 3.11 specialises ends at another place."""


class Stacks:
    """Interned stacks of running code.

    While a module call or the step of an optimizer is open, its outer frames do not change, so they are interned once
    (`enter`); the stacks of the ops inside are walked only up to that call.
    """

    def __init__(self, tables: StackTables | None = None) -> None:
        self.tables = tables or StackTables({}, [], {})
        self._numbers, self._chains, self._by_lines = self.tables
        self._walk = _Walk()

    @property
    def outer_number(self) -> int:
        """The number of the stack outside of the innermost open call, -1 for none."""
        return self._walk.outer.parent

    def number(self, frame: FrameType | None) -> int:
        """Return the number of the stack from `frame` outwards."""
        base, parent, code, at = self._walk.outer
        # By the ids of the code, which is kept below: the hash of code reads all of it.
        key: list[int] = []
        end = frame
        while end is not None:
            if id(end) == base and end.f_code is code and (at < 0 or end.f_lasti == at):
                key.append(parent)
                break
            key.append(id(end.f_code))
            key.append(end.f_lasti)
            end = end.f_back
        hashable = tuple(key)
        number = self._numbers.get(hashable)
        return self._new(hashable, frame, end) if number is None else number

    def _new(self, key: tuple[int, ...], frame: FrameType | None, end: FrameType | None) -> int:
        """Keep the code of the frames from `frame` to the frame before `end`; the key ends with the number of `end`."""
        parent = -1 if end is None else key[-1]
        chain: list[Any] = []
        lines = [parent]
        while frame is not end:
            assert frame is not None
            code = frame.f_code
            chain += (code, frame.f_lasti)
            # The interpreter finds a line in a hundredth of the time of `_line`.
            lines += (id(code), frame.f_lineno or code.co_firstlineno)
            frame = frame.f_back
        with _new_numbers:
            number = self._numbers[key] = self._by_lines.setdefault(tuple(lines), len(self._chains))
            if number == len(self._chains):
                self._chains.append((parent, tuple(chain)))
        return number

    def enter(self, frame: FrameType | None) -> Outer:
        """Begin a module call made by `frame` and intern the stack from there outwards; return a value for `leave`."""
        before = self._walk.outer
        number = self.number(frame)
        self._walk.outer = Outer(id(frame), number, None if frame is None else frame.f_code)
        return before

    def enter_line(self, frame: FrameType) -> Outer:
        """Begin a call that `leave` may never end: the stack is used while `frame` is at the same instruction."""
        before = self.enter(frame)
        self._walk.outer = self._walk.outer._replace(at=frame.f_lasti)
        return before

    def end_at(self, frame: FrameType) -> None:
        """Cut all stacks of the calling thread at a frame that runs for the whole recording."""
        self._walk.outer = Outer(id(frame), -1, frame.f_code)

    def leave(self, before: Outer) -> None:
        """End the call that `enter` or `enter_line` began."""
        self._walk.outer = before

    def intern_frames(self, frames: tuple[Frame, ...]) -> int:
        """Return the number of a stack given as `Frame` values."""
        number = self._numbers.get(frames)
        if number is None:
            with _new_numbers:
                number = self._numbers[frames] = len(self._chains)
                self._chains.append((-1, frames))
        return number

    def resolve(self, number: int, own: tuple[str, ...]) -> tuple[Frame, ...]:
        """Return the frames of a stack, innermost first, without files whose path starts with one of `own`."""
        frames: list[Frame] = []
        while number >= 0 and len(frames) < DEPTH:
            number, chain = self._chains[number]
            if chain and isinstance(chain[0], Frame):
                frames.extend(chain)
                continue
            for position in range(0, len(chain), 2):
                code, instruction = chain[position], chain[position + 1]
                if not code.co_filename.startswith(own):
                    frames.append(_frame(code, instruction, code.co_filename))
        return tuple(frames[:DEPTH])


_new_numbers = threading.Lock()
_shared = StackTables({}, [], {})


def shared_tables() -> StackTables:
    """Return the tables that recordings share: the code of their stacks stays alive, so they are bounded."""
    global _shared
    if len(_shared.numbers) > _MOST_SHARED:
        _shared = StackTables({}, [], {})
    return _shared


# The stacks of a step have the same frames in each step; a lookup in the table of lines takes longer than the rest.
@functools.lru_cache(maxsize=50_000)
def _frame(code: CodeType, instruction: int, filename: str) -> Frame:
    # Code of two files, such as two cells, is equal where its text and lines are.
    return Frame(encodable(filename), _line(code, instruction), code.co_qualname)


def _line(code: CodeType, instruction: int) -> int:
    for start, end, line in code.co_lines():
        if start <= instruction < end and line is not None:
            return line
    return code.co_firstlineno


def caller(depth: int) -> FrameType | None:
    """Return the frame `depth` calls above the caller's; None in a thread with fewer frames, such as autograd's."""
    try:
        return sys._getframe(depth + 1)
    except ValueError:
        return None
