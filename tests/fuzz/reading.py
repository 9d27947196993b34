"""What must hold of every file: it is read and shown, or refused with one sentence. Bytes in, an outcome out."""

from __future__ import annotations

import contextlib
import json
import os
import random
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from memexplore import snapshot
from memexplore.analysis import curves, summary, tables
from memexplore.cli.report_text import report_text
from memexplore.page import report
from memexplore.tape import Tape

FULL_REPORT = 40
"""One of so many files that can be read is shown in the terminal and as a DataFrame, ..."""
PAGE = 1000
"""... and one of so many becomes an HTML page: plotly takes 50 ms."""


def read_file(path: Path, rng: random.Random) -> str:
    """Read a file as `memexplore open` and `verify` do and return the outcome, `read` or `refused`.

    Raises AssertionError for any error but the documented ValueError, and for a text that is not one line.
    """
    try:
        tapes = snapshot.load(path)
        if rng.random() < 0.25:
            snapshot.verify(path)
    except ValueError as error:
        _check_refusal(error)
        return "refused"
    for tape in tapes.values():
        try:
            _show(tape, rng)
        except ValueError as error:
            assert "is not placed" in str(error), error
            return "not placed"
    return "read"


def read_bytes(data: bytes, rng: random.Random) -> str:
    """Read a file with the given content; see `read_file`."""
    with file_of(data) as path:
        return read_file(path, rng)


@contextlib.contextmanager
def file_of(data: bytes) -> Iterator[Path]:
    """Yield the path of a file with the given content; on Linux a killed process leaves nothing of it behind."""
    if sys.platform != "linux":
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder, "file")
            path.write_bytes(data)
            yield path
        return
    number = os.memfd_create("memexplore-fuzz")
    with os.fdopen(number, "wb") as file:
        file.write(data)
        file.flush()
        yield Path(f"/proc/self/fd/{number}")


def _check_refusal(error: ValueError) -> None:
    text = str(error)
    cause = error.__cause__
    assert isinstance(cause, (ValueError, OSError, OverflowError, type(None))), repr(cause)
    assert len(text) < 1000, f"an error of {len(text)} characters"
    assert text.isprintable(), ascii(text)


def _show(tape: Tape, rng: random.Random) -> None:
    """Make what the command line, the notebook and the page show of a tape."""
    curves.peak(tape, "reserved")
    curves.by_category(tape)
    if rng.randrange(FULL_REPORT):
        return
    json.dumps(summary.summary(tape)).encode()
    text = report_text(tape)
    text.encode()
    assert all(line.isprintable() for line in text.split("\n")), ascii(text)
    tape.to_pandas()
    tables.layers(tape)
    if not rng.randrange(PAGE // FULL_REPORT):
        report.html(tape).encode()
