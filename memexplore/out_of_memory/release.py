"""Give back what a failed cell still holds: the frames of errors, leftovers of libraries, cached blocks.

Variables of the user stay as they are.
"""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable, Iterable
from typing import NamedTuple

import torch

from memexplore.run.programs.out_of_memory import without_locals
from memexplore.text.units import size_text
from memexplore.torch_internals.cuda import CLEAR_CUBLAS_WORKSPACES


class Freed(NamedTuple):
    """Bytes that came back; 0 where no GPU is in use."""

    allocated: int
    reserved: int
    allocated_now: int
    reserved_now: int

    @property
    def text(self) -> str:
        """What came back, in two lines: one would be broken inside a word on a narrow page.

        >>> print(Freed(2048, 2 << 20, 512, 0).text)
        Freed 2,048 bytes (2.00 KiB): 512 B are allocated now.
        2.00 MiB of cached memory went back to the GPU, 0 B are reserved now.
        """
        freed = f"Freed {self.allocated:,} bytes ({size_text(self.allocated)})"
        now = f"{size_text(self.allocated_now)} are allocated now"
        cached = f"{size_text(self.reserved)} of cached memory went back to the GPU"
        return f"{freed}: {now}.\n{cached}, {size_text(self.reserved_now)} are reserved now."


def release(errors: Iterable[BaseException | None], drop: Callable[[], object] | None = None) -> Freed:
    """Free what the frames of errors and of their causes hold, what a failed backward pass left, and cached blocks.

    The workspaces of cuBLAS are freed too: the next matrix product requests them again. `drop` is a function that drops
    references to more; what this frees is counted too. The errors have no traceback afterwards, so that `%debug` has
    nothing to show; variables of the notebook stay.

    >>> def fail(large):
    ...     raise ValueError("no")
    >>> try:
    ...     fail([1])
    ... except ValueError as raised:
    ...     error = raised
    >>> _ = release([error])
    >>> error.__traceback__ is None
    True
    """
    before = _held()
    if drop is not None:
        drop()
    for error in (*errors, *last_errors()):
        if error is not None:
            without_locals(error)
            _drop_tracebacks(error)
    if hasattr(sys, "last_traceback"):
        del sys.last_traceback
    # The engine keeps what a failed pass left until the next pass of the thread.
    with torch.enable_grad():
        torch.ones(1, device="cpu", requires_grad=True).sum().backward()
    gc.collect()
    if torch.cuda.is_available():
        clear_workspaces = getattr(*CLEAR_CUBLAS_WORKSPACES, None)
        if clear_workspaces is not None:
            clear_workspaces()
        torch.cuda.empty_cache()
    now = _held()
    return Freed(before[0] - now[0], before[1] - now[1], *now)


def last_errors() -> list[BaseException]:
    """Return the errors that Python keeps for `pdb.pm()`."""
    errors = [getattr(sys, name, None) for name in ("last_exc", "last_value")]
    return [error for error in errors if isinstance(error, BaseException)]


def _held() -> tuple[int, int]:
    if not torch.cuda.is_available():
        return 0, 0
    return torch.cuda.memory_allocated(), torch.cuda.memory_reserved()


def _drop_tracebacks(error: BaseException) -> None:
    """Drop the frames themselves: each keeps its function, and the function the variables of those around it."""
    links: list[BaseException | None] = [error]
    while links:
        link = links.pop()
        if link is not None and link.__traceback__ is not None:
            link.__traceback__ = None
            links += [link.__cause__, link.__context__, *getattr(link, "exceptions", ())]
