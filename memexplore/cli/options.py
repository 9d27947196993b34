"""Exit statuses of the command line, and the checks of options that several commands share."""

from __future__ import annotations

import re

from memexplore import gpu_catalogue

FITS, ERROR, USAGE, OOM, NOT_ON_GPU, INTERRUPTED = 0, 1, 2, 3, 4, 130
"""Exit statuses; 130 is the shell's status for Ctrl-C."""


class UsageError(Exception):
    """Invalid command line; the message says what to write instead."""


def find_gpu(text: str) -> gpu_catalogue.Gpu:
    """Return a GPU of the catalogue; raise UsageError for an unknown one."""
    try:
        return gpu_catalogue.find(text)
    except ValueError as error:
        raise UsageError(str(error)) from None


def check_release(text: str | None) -> None:
    """Raise UsageError for a text that is not a torch release."""
    if text is not None and not re.fullmatch(r"\d+\.\d+(\.\d+)?", text):
        raise UsageError(f"{text!r} is not a torch release; write one such as 2.11")
