"""Showing a run while it goes on: its status goes to the bottom of a terminal, or in plain lines to a file or a pipe.

A thread of its own looks at the run every half second, or less often where drawing would take more than 1 % of the
time.
"""

from __future__ import annotations

import contextlib
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any, TextIO

from memexplore.cli import live_text
from memexplore.cli.live_status import Status
from memexplore.cli.terminal import Bottom, is_terminal

_SECONDS, _LONGEST = 0.5, 2.0
_SHARE = 0.01
"""Share of the time that showing the run may take."""
_FIRST_LINES, _LONGEST_PAUSE = 10.0, 600.0
_LATER = 1.5
"""Times that have passed at a plain line over that at the line before it."""


class Display:
    """The thread that shows a run; `status` is called with the share of the time that showing takes."""

    def __init__(self, status: Callable[[float], Status | None], stream: TextIO) -> None:
        self._status, self._stream = status, stream
        self._bottom = Bottom(stream.fileno()) if is_terminal(stream) else None
        self._colours = colours(stream) if self._bottom is not None else None
        # Locks of C: on a virtual GPU, threads that wait for those of Python get its modes.
        self._ends = threading.Lock()
        self._thread: threading.Thread | None = None
        self._spent = 0.0
        self._began = time.monotonic()
        self._warned = ""
        self.problem = ""
        """The error that ended the thread, "" without one."""

    def __enter__(self) -> Display:
        self._ends.acquire()
        self._thread = threading.Thread(target=self._run, name="memexplore display", daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        try:
            if self._ends.locked():
                self._ends.release()
            if self._thread is not None:
                self._thread.join(5.0)
        finally:
            if self._bottom is not None:
                self._bottom.close()

    def _run(self) -> None:
        try:
            pause, line_at = _SECONDS, 0.0
            while not self._ends.acquire(timeout=pause):
                began = time.monotonic()
                status = self._status(self._spent / max(began - self._began, 1e-9))
                if status is not None and self._bottom is not None:
                    width = self._bottom.width
                    shown = live_text.drawn(live_text.lines(status, width), width, self._colours)
                    self._bottom.draw(["─" * width, *shown])
                elif status is not None and status.newest is not None and self._is_due(status, began, line_at):
                    print(live_text.plain(status), file=self._stream, flush=True)
                    line_at = next_line(began - self._began)
                    self._warned = _warning(status)
                spent = time.monotonic() - began
                self._spent += spent
                pause = min(max(_SECONDS, spent / _SHARE), _LONGEST)
        except Exception as error:
            # The program goes on without it.
            self.problem = f"{type(error).__name__}: {error}"

    def _is_due(self, status: Status, now: float, line_at: float) -> bool:
        warns = bool(status.growth) and _warning(status) != self._warned
        return warns or now - self._began >= line_at


def _warning(status: Status) -> str:
    # Without the numbers, which change with each step.
    return "".join(character for character in status.growth if not character.isdigit())


def next_line(elapsed: float) -> float:
    """Return the time of the plain line that follows one, both in seconds from the begin.

    >>> next_line(0.5), next_line(100.0), next_line(86400.0)
    (10.0, 150.0, 87000.0)
    """
    return max(min(elapsed * _LATER, elapsed + _LONGEST_PAUSE), _FIRST_LINES)


def colours(stream: TextIO) -> str | None:
    """Return the colour system of `rich` for a terminal, None without colours."""
    from rich.console import Console

    return Console(file=stream).color_system


def stream() -> TextIO:
    """Return where a run is shown: standard error, or standard output where only that is a terminal."""
    return sys.stdout if is_terminal(sys.stdout) and not is_terminal(sys.stderr) else sys.stderr


def is_shown_here() -> bool:
    """Return whether this process shows its run: of those that `torchrun` starts on a machine, the first one."""
    return "TORCHELASTIC_RUN_ID" not in os.environ or os.environ.get("LOCAL_RANK", "0") == "0"


@contextlib.contextmanager
def display(status: Callable[[float], Status | None]) -> Iterator[Any]:
    """Show a run during the block."""
    if not is_shown_here():
        yield None
        return
    shown = Display(status, stream())
    with shown:
        yield shown
    if shown.problem:
        print(f"memexplore: the run was shown up to an error of its own ({shown.problem})", file=sys.stderr)
