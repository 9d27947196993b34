"""A process that gives the rows of a terminal back when the program that keeps them is killed.

A program that is ended by a signal, by `os._exit` or by a crash runs no more code of Python. A shell waits for the end
of a pipe that this process holds open, and then writes the control codes that this process could not write. So no
handler of a signal is changed, and the program ends as it would without memexplore.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import weakref

# The pipe carries lines with "1" or "0" for whether rows are kept. The shell in between ends at once, so that
# the program has no child that it did not start; signals to the group of the program do not end the one that waits.
_SCRIPT = """
exec 3<&0
(
    trap '' HUP INT QUIT TERM
    kept=0
    while read -r line <&3; do kept=$line; done
    if [ "$kept" = 1 ]; then printf %s "$1"; fi
) &
"""
_guards: weakref.WeakSet[Guard] = weakref.WeakSet()


class Guard:
    """Writes control codes to a terminal if this process ends while rows are kept; does nothing without a shell."""

    def __init__(self, descriptor: int, codes: str) -> None:
        self._pipe: int | None = None
        if os.name == "posix":
            with contextlib.suppress(OSError, subprocess.SubprocessError):
                self._pipe = _start(descriptor, codes)
                _guards.add(self)

    def set(self, are_rows_kept: bool) -> None:
        """Note whether rows of the terminal are kept now."""
        if self._pipe is not None:
            with contextlib.suppress(OSError):
                os.write(self._pipe, b"1\n" if are_rows_kept else b"0\n")

    def close(self) -> None:
        """End the process that waits. It may be called twice."""
        pipe, self._pipe = self._pipe, None
        if pipe is not None:
            os.close(pipe)


def _start(descriptor: int, codes: str) -> int:
    """Start the process that waits, and return the end of its pipe.

    Raises OSError or SubprocessError if it does not start.
    """
    read, write = os.pipe()
    try:
        command = ["/bin/sh", "-c", _SCRIPT, "sh", codes]
        subprocess.run(
            command, stdin=read, stdout=descriptor, stderr=subprocess.DEVNULL, start_new_session=True, check=True
        )
    except (OSError, subprocess.SubprocessError):
        os.close(write)
        raise
    finally:
        os.close(read)
    return write


def _forget() -> None:
    """Close the pipes of the parent in a forked child, which may live longer."""
    for guard in list(_guards):
        guard.close()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget)
