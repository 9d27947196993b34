"""Drop what a block prints, but not what other threads print meanwhile."""

from __future__ import annotations

import contextlib
import io
import sys
import threading
from collections.abc import Iterator
from typing import TextIO


class _Stream(io.StringIO):
    """A text stream that passes on what some threads write, and drops the rest."""

    def __init__(self, stream: TextIO, passed: frozenset[int]) -> None:
        super().__init__()
        self._stream, self._passed = stream, passed

    def write(self, text: str) -> int:
        """Write a text, or drop it."""
        return self._stream.write(text) if threading.get_ident() in self._passed else len(text)

    def writelines(self, lines: object) -> None:
        """Write lines, or drop them."""
        for line in lines:  # type: ignore[attr-defined]
            self.write(line)

    def flush(self) -> None:
        """Flush the stream for a thread that writes to it."""
        if threading.get_ident() in self._passed:
            self._stream.flush()


@contextlib.contextmanager
def without_prints() -> Iterator[None]:
    """Drop what this thread, and threads that it starts, print in the block.

    >>> with without_prints():
    ...     print("dropped")
    """
    # The kernel answers the browser in a thread of its own, and its messages must not be lost.
    others = frozenset(thread.ident or 0 for thread in threading.enumerate()) - {threading.get_ident()}
    with (
        contextlib.redirect_stdout(_Stream(sys.stdout, others)),
        contextlib.redirect_stderr(_Stream(sys.stderr, others)),
    ):
        yield
