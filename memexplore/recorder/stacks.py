"""Python stacks interned as numbers: a running frame goes in, the number of its stack comes out."""

from __future__ import annotations

import sys
import threading
from types import CodeType, FrameType
from typing import Any

from memexplore.tape import Frame
from memexplore.texts import encodable

DEPTH = 128
"""Frames kept of one stack, innermost first."""


class _Walk(threading.local):
    """The end of a walk through the frames of a thread."""

    base = 0
    """The id of the frame at which a walk stops, 0 for none."""
    parent = -1
    """The number of the stack from that frame outwards."""


class Stacks:
    """Interned stacks of running code.

    While a module call is open, its outer frames do not change, so they are interned once (`enter`); the stacks of the
    ops inside are walked only up to that call.
    """

    def __init__(self) -> None:
        self._numbers: dict[tuple[Any, ...], int] = {}
        self._chains: list[tuple[int, tuple[Any, ...]]] = []
        self._walk = _Walk()

    def number(self, frame: FrameType | None) -> int:
        """Return the number of the stack from `frame` outwards."""
        walk = self._walk
        base = walk.base
        key: list[Any] = [-1]
        while frame is not None:
            if base and id(frame) == base:
                key[0] = walk.parent
                break
            key.append(frame.f_code)
            key.append(frame.f_lasti)
            frame = frame.f_back
        hashable = tuple(key)
        number = self._numbers.get(hashable)
        if number is None:
            number = self._numbers[hashable] = len(self._chains)
            self._chains.append((hashable[0], hashable[1:]))
        return number

    def enter(self, frame: FrameType | None) -> tuple[int, int]:
        """Begin a module call made by `frame` and intern the stack from there outwards; return a value for `leave`."""
        walk = self._walk
        before = (walk.base, walk.parent)
        number = self.number(frame)
        walk.base, walk.parent = id(frame), number
        return before

    def end_at(self, frame: FrameType) -> None:
        """Cut all stacks of the calling thread at a frame that runs for the whole recording."""
        self._walk.base, self._walk.parent = id(frame), -1

    def leave(self, before: tuple[int, int]) -> None:
        """End the module call that `enter` began."""
        self._walk.base, self._walk.parent = before

    def intern_frames(self, frames: tuple[Frame, ...]) -> int:
        """Return the number of a stack given as `Frame` values."""
        number = self._numbers.get(frames)
        if number is None:
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
                    frames.append(Frame(encodable(code.co_filename), _line(code, instruction), code.co_qualname))
        return tuple(frames[:DEPTH])


_lines: dict[CodeType, list[tuple[int, int, int | None]]] = {}


def _line(code: CodeType, instruction: int) -> int:
    ranges = _lines.get(code)
    if ranges is None:
        ranges = _lines[code] = list(code.co_lines())
    for start, end, line in ranges:
        if start <= instruction < end and line is not None:
            return line
    return code.co_firstlineno


def caller(depth: int) -> FrameType | None:
    """Return the frame `depth` calls above the caller's; None in a thread with fewer frames, such as autograd's."""
    frame: FrameType | None = sys._getframe(1)
    while depth > 0 and frame is not None:
        frame = frame.f_back
        depth -= 1
    return frame
