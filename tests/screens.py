"""A terminal for tests: a program runs in a pseudo-terminal, and its screen can be read at any time."""

from __future__ import annotations

import contextlib
import fcntl
import os
import pty
import select
import signal
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pyte

import memexplore

SECONDS = 200
"""For a program that imports torch, at the lowest priority on a busy machine."""


class Terminal:
    """A pseudo-terminal, the emulator of its screen, and the program in it."""

    def __init__(self, command: list[str], columns: int = 100, rows: int = 30, **options: Any) -> None:
        self.screen = pyte.HistoryScreen(columns, rows, history=10_000, ratio=1)
        self._stream = pyte.ByteStream(self.screen)
        self._main, other = pty.openpty()
        self.resize(columns, rows)
        self.raw = b""
        root = str(Path(memexplore.__file__).parents[1])
        environment = os.environ | {"CUDA_VISIBLE_DEVICES": "", "TERM": "xterm-256color", "PYTHONPATH": root}
        for name in ("COLUMNS", "LINES"):  # they count more than the size of the terminal
            environment.pop(name, None)
        # A shell ignores Ctrl-C in what it starts in the background, such as this test run, and so would the program.
        before = signal.signal(signal.SIGINT, signal.default_int_handler)
        try:
            self.process = subprocess.Popen(
                command, stdin=other, stdout=other, stderr=other, env=environment, start_new_session=True, **options
            )
        finally:
            signal.signal(signal.SIGINT, before)
        os.close(other)

    def resize(self, columns: int, rows: int) -> None:
        """Give the terminal another size."""
        fcntl.ioctl(self._main, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))
        self.screen.resize(rows, columns)

    def read(self, seconds: float = 0.1) -> bool:
        """Read what the program has written within some seconds; return whether it may write more."""
        end = time.monotonic() + seconds
        while (left := end - time.monotonic()) > 0:
            if select.select([self._main], [], [], left)[0]:
                try:
                    data = os.read(self._main, 1 << 16)
                except OSError:
                    return False
                if not data:
                    return False
                self.raw += data
                self._stream.feed(data)
        return True

    def wait_for(self, text: str, seconds: float = SECONDS) -> None:
        """Read until the screen has a text; the rows below it may still be empty, as a read may end within a frame."""
        self.wait_until(lambda lines: text in "\n".join(lines), seconds)

    def wait_until(self, condition: Callable[[list[str]], bool], seconds: float = SECONDS) -> None:
        """Read until a condition on the rows of the screen holds."""
        end = time.monotonic() + seconds
        while not condition(self.lines()):
            if not self.read() or time.monotonic() > end:
                assert condition(self.lines()), "\n".join(self.lines())

    def wait(self, seconds: float = SECONDS) -> int:
        """Read to the end of the program, and return its exit status."""
        end = time.monotonic() + seconds
        while self.read() and time.monotonic() < end:
            pass
        return self.process.wait(seconds)

    def interrupt(self) -> None:
        """Send the signal of Ctrl-C."""
        self.process.send_signal(signal.SIGINT)

    def lines(self) -> list[str]:
        """Return the rows of the screen."""
        return [line.rstrip() for line in self.screen.display]

    def everything(self) -> list[str]:
        """Return the rows that scrolled off the screen, and those on it."""
        columns = range(self.screen.columns)
        above = ["".join(line[column].data for column in columns).rstrip() for line in self.screen.history.top]
        return above + self.lines()


@contextlib.contextmanager
def terminal(*arguments: Any, **options: Any) -> Iterator[Terminal]:
    """Run a command of memexplore in a terminal."""
    command = [sys.executable, "-m", "memexplore.cli", *map(str, arguments)]
    running = Terminal(command, **options)
    try:
        yield running
    finally:
        if running.process.poll() is None:
            running.process.kill()
            running.process.wait()
