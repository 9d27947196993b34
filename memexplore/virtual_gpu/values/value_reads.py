"""Count the reads of unknown values by the program, and end a loop that waits for one in vain.

A virtual GPU gives the same number for an unknown value again and again, so a loop whose end depends on one may have no
end. Such a loop reads a value and tests it in each round, always on the same line: that line is named in a warning
after `WARNED` rounds and in an error after `LIMIT`.
"""

from __future__ import annotations

import functools
import os
import sys
import warnings
from types import FrameType

import torch

from memexplore.text.package import FOLDER

WARNED = 1_000
"""Tests on one line, each of a value read since the test before, that make a warning."""
LIMIT = 100_000
"""Tests on one line, counted likewise, that end the program."""
_WARNING = (
    f"this line has read {WARNED:,} values that a virtual GPU does not know, each time the same number: "
    "if a loop ends by it, interrupt the program and give the loop a fixed number of rounds (for _ in range(n))"
)


class NotSimulated(RuntimeError):
    """Code that a virtual GPU cannot run; the message names the line of the user's code and what to do instead."""


class _Reads:
    """What the program has read since the virtual GPU was turned on."""

    number = 0
    """Unknown values, or tensors of them, that became Python numbers."""
    ones = 0
    """Floating-point values among them that were read as 1."""
    first = ""
    """File and line of the first of these."""


_tests: dict[tuple[str, int], tuple[int, int]] = {}
"""File and line -> tests there, and `_Reads.number` at the last of them."""


def reset() -> None:
    """Forget all reads, when a virtual GPU is turned on."""
    _tests.clear()
    _Reads.number = _Reads.ones = 0
    _Reads.first = ""


@functools.cache
def _own_folders() -> tuple[str, ...]:
    return os.path.dirname(torch.__file__) + os.sep, f"{FOLDER}{os.sep}"


def user_frame() -> FrameType | None:
    """Return the innermost running frame outside torch and memexplore."""
    frame: FrameType | None = sys._getframe(1)
    folders = _own_folders()
    while frame is not None and frame.f_code.co_filename.startswith(folders):
        frame = frame.f_back
    return frame


def file_and_line(frame: FrameType | None) -> str:
    """Return `file:line` of a frame."""
    return f"{frame.f_code.co_filename}:{frame.f_lineno}" if frame is not None else "<unknown>"


def count_read(ones: int = 0) -> None:
    """Count that the program reads an unknown tensor; `ones` of its values are floating-point numbers read as 1."""
    _Reads.number += 1
    if ones and not _Reads.ones:
        _Reads.first = file_and_line(user_frame())
    _Reads.ones += ones


def note_on_reads() -> str:
    """Return the note of the tape that says how many values were read as 1 and where first, "" if there were none."""
    if not _Reads.ones:
        return ""
    values = "value was" if _Reads.ones == 1 else "values were"
    return f"assumed: {_Reads.ones:,} unknown floating-point {values} read as 1, first at {_Reads.first}"


def count_test() -> None:
    """Count that the running line of the program tests or converts an unknown value.

    Raises NotSimulated where that line has done it so often that it is the end of a loop which has none.
    """
    frame = user_frame()
    if frame is None:
        return
    line = (frame.f_code.co_filename, frame.f_lineno)
    count, last_read = _tests.get(line, (0, -1))
    if last_read == _Reads.number:
        return
    count += 1
    _tests[line] = count, _Reads.number
    if count == WARNED:
        warnings.warn_explicit(_WARNING, RuntimeWarning, *line)
    if count >= LIMIT:
        raise NotSimulated(
            f"{file_and_line(frame)}: this line has read {LIMIT:,} values that a virtual GPU does not know; "
            "give a loop that ends by them a fixed number of rounds (for _ in range(n)), or run with values='real'"
        )
