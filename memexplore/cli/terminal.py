"""Lines at the bottom of a terminal that change in place, while the program above them prints as it likes.

The terminal itself keeps both apart: it scrolls only the rows above (its scroll region, as `apt` uses it). So nothing
that a program writes is redirected, and progress bars, child processes and native code print as without memexplore.
Where the program is killed, a process of its own gives the rows back (`terminal_guard`).
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Sequence
from typing import TextIO

from memexplore.cli.terminal_guard import Guard

_SAVE, _RESTORE, _ERASE_BELOW, _ALL_ROWS, _DOWN = "\x1b7", "\x1b8", "\x1b[J", "\x1b[r", "\x1bD"
# Setting the region moves the cursor, hence it is saved.
_GIVE_BACK = f"{_SAVE}{_ALL_ROWS}{_RESTORE}{_ERASE_BELOW}"
_LEAST_ABOVE = 4
"""Rows that stay for the program."""


def is_terminal(stream: TextIO | None) -> bool:
    """Return whether a stream is a terminal that understands control codes."""
    try:
        return stream is not None and stream.isatty() and os.environ.get("TERM") != "dumb"
    except ValueError:  # a closed stream
        return False


class Bottom:
    """The lowest rows of the terminal of a file descriptor."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._process = os.getpid()
        self._guard = Guard(descriptor, _GIVE_BACK)
        self._rows = 0
        """Rows kept, 0 before the first lines are drawn."""
        self._size = os.terminal_size((0, 0))

    @property
    def width(self) -> int:
        """Columns of the terminal."""
        return self._terminal_size().columns

    def _terminal_size(self) -> os.terminal_size:
        try:
            size = os.get_terminal_size(self._descriptor)
        except OSError:
            size = os.terminal_size((0, 0))
        return size if size.columns and size.lines else os.terminal_size((80, 24))

    def draw(self, lines: Sequence[str]) -> None:
        """Show lines that are not wider than the terminal; those that have no room are left out."""
        size = self._terminal_size()
        room = max(size.lines - _LEAST_ABOVE, 1)
        rows = min(max(len(lines), self._rows), room)
        text = ""
        if rows != self._rows or size != self._size:
            self._guard.set(are_rows_kept=True)
            text += self._reset() + self._open(rows, size)
        self._rows, self._size = rows, size
        first = size.lines - rows + 1
        shown = [*lines[:rows], *[""] * (rows - len(lines))]
        text += (
            _SAVE + "".join(f"\x1b[{first + row};1H\x1b[2K{line}\x1b[0m" for row, line in enumerate(shown)) + _RESTORE
        )
        self._write(text)

    def _reset(self) -> str:
        return _GIVE_BACK if self._rows else ""

    def _open(self, rows: int, size: os.terminal_size) -> str:
        # Scrolls only if the cursor is further down than the rows that stay, and keeps its column.
        return f"{_DOWN * rows}\x1b[{rows}A{_SAVE}\x1b[1;{size.lines - rows}r{_RESTORE}"

    def close(self) -> None:
        """Give the rows back to the program. It may be called twice."""
        if self._rows:
            self._write(self._reset())
            self._rows = 0
        self._guard.set(are_rows_kept=False)
        self._guard.close()

    def _write(self, text: str) -> None:
        # In one call, so that what the program prints comes before or after. A forked child has no share in it.
        if os.getpid() == self._process:
            with contextlib.suppress(OSError):
                data = text.encode()
                while data:
                    data = data[os.write(self._descriptor, data) :]
