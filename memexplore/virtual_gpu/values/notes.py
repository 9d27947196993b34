"""Collect the assumptions and notes of a run for its tape.

An *assumption* is about a value that is not known, and has the line of the user's code that needs it. A *note* is about
anything else that the reader of the tape should know, such as that a workspace is an estimate.
"""

from __future__ import annotations

from memexplore.virtual_gpu.values import value_reads

_noted: dict[str, None] = {}
"""Assumptions and notes of the run, in order."""
recent_notes: list[str] = []
"""Notes since the dispatch mode emptied it: a plan repeats the notes of its making whenever it is carried out."""


def reset() -> None:
    """Forget assumptions, notes and reads, when a virtual GPU is turned on."""
    _noted.clear()
    recent_notes.clear()
    value_reads.reset()


def notes_of_run() -> tuple[str, ...]:
    """Return the assumptions and notes of the run for the tape: in order, and at last how many values were read."""
    return (*_noted, *filter(None, [value_reads.note_on_reads()]))


def add(text: str) -> None:
    """Add a note to the tape, once, such as that a workspace is an estimate."""
    _noted.setdefault(text)
    recent_notes.append(text)


def assume(text: str) -> None:
    """Add an assumption to the tape, with the line of the user's code that needs it."""
    frame = value_reads.user_frame()
    line = f" ({value_reads.file_and_line(frame)})" if frame is not None else ""
    _noted.setdefault(f"assumed: {text}{line}")
