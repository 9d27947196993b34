"""Show the traceback of an out-of-memory error as on a GPU: its last line is that of the user or of torch.

The frames of this package are removed: their local variables would keep tensors alive as well.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from types import TracebackType
from typing import Any

import torch

from memexplore.text.package import FOLDER

_PACKAGE = f"{FOLDER}{os.sep}"


def hide_own_frames(error: BaseException) -> None:
    """Remove the frames of this package from the traceback of an error that is being handled.

    A `raise` without an expression after it adds no entry for the frame that it is in.

    >>> def fail():
    ...     try:
    ...         hide_own_frames("not an error")
    ...     except AttributeError as error:
    ...         hide_own_frames(error)
    ...         raise
    >>> try:
    ...     fail()
    ... except AttributeError as error:
    ...     entry = error.__traceback__
    >>> entry.tb_next.tb_frame.f_code.co_name, entry.tb_next.tb_next
    ('fail', None)
    """
    kept: list[TracebackType] = []
    entry = error.__traceback__
    while entry is not None:
        if not entry.tb_frame.f_code.co_filename.startswith(_PACKAGE):
            kept.append(entry)
        entry = entry.tb_next
    following: TracebackType | None = None
    for entry in reversed(kept):
        if entry.tb_next is not following:
            entry.tb_next = following
        following = entry
    error.__traceback__ = following


def without_own_frames(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that user code or torch calls, from whose out-of-memory errors its own frames are removed."""

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        try:
            return function(*args, **kwargs)
        except torch.OutOfMemoryError as error:
            hide_own_frames(error)
            raise

    return call
