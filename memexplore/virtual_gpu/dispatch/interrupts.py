"""Defer Ctrl-C in a function that must complete: the KeyboardInterrupt is raised as soon as the function has ended.

Python prints and drops an exception of a weakref's callback, such as the one that frees the block of a dead storage,
so that a training loop would go on; and an allocator interrupted in a request would not add up afterwards.
"""

from __future__ import annotations

import _thread
import signal
import threading
import time
from collections.abc import Callable
from types import CodeType, FrameType
from typing import Any, TypeVar

Function = TypeVar("Function", bound=Callable[..., Any])

_SECONDS = 0.001
_codes: set[CodeType] = set()


def uninterrupted(function: Function) -> Function:
    """Let a function complete: while a `Deferral` is installed, Ctrl-C is raised after its end."""
    _codes.add(function.__code__)  # type: ignore[attr-defined]
    return function


class Deferral:
    """A patch: the handler of SIGINT, where it is a function of Python; it calls the one that it replaces."""

    def __init__(self) -> None:
        self._before: Any = None

    def undo(self) -> Callable[[], object]:
        """Return a function that restores the replaced handler, unless it was replaced by another one since."""
        return self._restore

    def install(self) -> None:
        """Replace the handler. It may be called again, as Jupyter sets its own before each cell."""
        before: Any = signal.getsignal(signal.SIGINT)
        if callable(before) and before is not self and threading.current_thread() is threading.main_thread():
            # Before `__call__` can come.
            self._before = before
            signal.signal(signal.SIGINT, self)

    def _restore(self) -> None:
        present: Any = signal.getsignal(signal.SIGINT)
        if present is self and threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGINT, self._before)

    def __call__(self, number: int, frame: FrameType | None) -> None:
        """Handle the signal, later if it comes in an uninterrupted function."""
        running = frame
        while running is not None and running.f_code not in _codes:
            running = running.f_back
        if running is None:
            self._before(number, frame)
        else:
            # Not of `threading`, whose threads get the modes of the virtual GPU when they start.
            _thread.start_new_thread(_raise_again, (number,))


def _raise_again(number: int) -> None:
    time.sleep(_SECONDS)
    _thread.interrupt_main(signal.Signals(number))
