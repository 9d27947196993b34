"""Running out of memory: whether a tape ends there, and how a run on a real device ends without keeping tensors."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from types import FrameType, TracebackType

import torch

from memexplore.analysis.verdict import failed_request
from memexplore.recorder.recording import Recording
from memexplore.tape import Tape


def fits(tape: Tape) -> bool:
    """Return whether no request ended the run; the program may have caught failed requests and gone on."""
    return failed_request(tape) < 0


@contextlib.contextmanager
def ending_out_of_memory(recording: Recording | None = None) -> Iterator[None]:
    """End the block, and the program of a recording, without an error where a GPU has no memory left."""
    try:
        yield
    except torch.OutOfMemoryError as error:
        if recording is not None:
            recording.ended_by(error)
        without_locals(error)


def without_locals(error: BaseException) -> None:
    """Clear the local variables of an error's frames, which would keep tensors alive; the lines stay.

    >>> def fail(large):
    ...     raise ValueError("no")
    >>> try:
    ...     fail(large=[1])
    ... except ValueError as error:
    ...     without_locals(error)
    ...     error.__traceback__.tb_next.tb_frame.f_locals
    {}
    """
    seen: set[int] = set()
    links: list[BaseException | None] = [error]
    while links:
        link = links.pop()
        if link is not None and id(link) not in seen:
            seen.add(id(link))
            for frame in _frames(link.__traceback__):
                # A frame that still runs cannot be cleared.
                with contextlib.suppress(RuntimeError):
                    frame.clear()
                # Up to Python 3.12 a frame keeps the dictionary that its `f_locals` has returned once; this empties it.
                frame.f_locals  # noqa: B018
            links += [link.__cause__, link.__context__, *getattr(link, "exceptions", ())]


def _frames(trace: TracebackType | None) -> Iterator[FrameType]:
    """Yield the frames of a traceback, and those between them that were taken out of it (`user_traceback`)."""
    before: FrameType | None = None
    while trace is not None:
        frame: FrameType | None = trace.tb_frame
        yield trace.tb_frame
        while before is not None and frame is not None and (frame := frame.f_back) is not before:
            if frame is not None:
                yield frame
        before, trace = trace.tb_frame, trace.tb_next
