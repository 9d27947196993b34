"""Exit statuses of the command line, and the checks of options that several commands share."""

from __future__ import annotations

import argparse
import contextlib
import pathlib
import re
import sys
from collections.abc import Callable, Iterator

from memexplore.hardware import catalogue
from memexplore.text import result_files

FITS, ERROR, USAGE, OOM, NOT_KNOWN, INTERRUPTED = 0, 1, 2, 3, 4, 130
"""Exit statuses; `NOT_KNOWN`: nothing ran on the GPU, or child processes were not measured.
130 is the shell's status for Ctrl-C."""


AddCommand = Callable[[str, str], argparse.ArgumentParser]
"""Adds the parser of a command, by its name and its help."""


class UsageError(Exception):
    """Invalid command line; the message says what to write instead."""


def find_gpu(text: str) -> catalogue.Gpu:
    """Return a GPU of the catalogue; raise UsageError for an unknown one."""
    try:
        return catalogue.find(text)
    except ValueError as error:
        raise UsageError(str(error)) from None


def check_output(option: str, path: str | pathlib.Path | None, kind: result_files.Kind) -> None:
    """Raise UsageError for a path to which the result of an option cannot be written."""
    if path is None:
        return
    try:
        result_files.check(path, kind)
    except ValueError as error:
        raise UsageError(f"{option}: {error}") from None


def write_output(path: pathlib.Path, writer: Callable[[pathlib.Path], object]) -> None:
    """Write a result, and print where it is if its path could not be written after all."""
    _, problem = result_files.write(path, writer)
    if problem:
        print(f"memexplore: {problem}", file=sys.stderr)


def check_release(text: str | None) -> None:
    """Raise UsageError for a text that is not a torch release."""
    # As `virtual_gpu.device.release_of`, which needs torch.
    if text is not None and not re.fullmatch(r"2\.\d{1,2}(\.\d{1,3})?", text):
        raise UsageError(f"{text!r} is not a torch release; write one such as 2.11")


@contextlib.contextmanager
def reading(path: pathlib.Path) -> Iterator[None]:
    """Print the error of an unreadable file as one sentence, and exit with the status of an error."""
    try:
        yield
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        print(f"memexplore: {reason if str(path) in reason else f'{path}: {reason}'}", file=sys.stderr)
        raise SystemExit(ERROR) from None
