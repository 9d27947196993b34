"""Interrupts at chosen lines: a function goes in; it is run with a KeyboardInterrupt at its n-th line, for every n.

Every line counts that runs in a frame below the function: of memexplore, of torch and of the standard library. Only
those of importlib do not: an interrupt between its taking Python's import lock and its `try` leaves the lock taken for
ever, and every import in another thread waits for it.
"""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any, NamedTuple

_IMPORTLIB = "<frozen importlib"


class Line(NamedTuple):
    """A line of source code that ran."""

    filename: str
    number: int


def lines_of(function: Callable[[], object]) -> list[Line]:
    """Return the lines that run below a function, in order and with repetitions."""
    lines: list[Line] = []

    def trace(frame: FrameType, event: str, argument: Any) -> Any:
        if event == "line" and not frame.f_code.co_filename.startswith(_IMPORTLIB):
            lines.append(Line(frame.f_code.co_filename, frame.f_lineno))
        return trace

    _traced(function, trace)
    return lines


def interrupted(function: Callable[[], object], number: int, files: str = "") -> Line | None:
    """Run a function with a KeyboardInterrupt at its line of a number, counted from 0; None if it has fewer lines.

    Only lines of files count whose names begin with `files`.
    The traceback of the interrupt, with all its frames, stays alive as `sys.last_exc` does in a notebook.
    """
    at: list[Line] = []
    count = 0

    def trace(frame: FrameType, event: str, argument: Any) -> Any:
        nonlocal count
        name = frame.f_code.co_filename
        if event == "line" and not at and name.startswith(files) and not name.startswith(_IMPORTLIB):
            if count == number:
                at.append(Line(name, frame.f_lineno))
                raise KeyboardInterrupt
            count += 1
        return trace

    try:
        _traced(function, trace)
    except KeyboardInterrupt as error:
        LAST[:] = [error]
    return at[0] if at else None


LAST: list[BaseException] = []
"""The last interrupt, which keeps its frames and their variables."""


def interrupts(function: Callable[[], object]) -> Iterator[Line]:
    """Run a function once for each of its lines, interrupted there."""
    number = 0
    while (line := interrupted(function, number)) is not None:
        yield line
        number += 1


def _traced(function: Callable[[], object], trace: Any) -> None:
    traced(function, lambda frame, event, argument: None if frame.f_code is function.__code__ else trace)  # type: ignore[attr-defined]


def traced(function: Callable[[], object], trace: Any) -> None:
    """Run a function with a trace function, and collect no garbage on the way.

    Garbage of earlier tests may have callbacks, in which Python prints an interrupt and goes on.
    This is no context manager: the lines of contextlib that leave it would be traced, and interrupted.
    The function is called by a generator, which has handled exceptions of its own: Python 3.11 stays in a handler whose
    last line, such as `return None`, is interrupted by a trace function.
    """
    before, collects = sys.gettrace(), gc.isenabled()
    gc.disable()

    def calls() -> Iterator[object]:
        # Here, because the generator is not to be traced.
        sys.settrace(trace)
        yield function()

    call = calls()
    try:
        next(call)
    finally:
        sys.settrace(before)
        if collects:
            gc.enable()
