"""A change of the code that a post-mortem proposes."""

from __future__ import annotations

from typing import NamedTuple


class Suggestion(NamedTuple):
    """One change of the code."""

    text: str
    """What to do, as a sentence."""
    code: str
    """Line to write, empty where there is none."""
    frees: int
    """Bytes that it gives back, 0 where they are not known."""
    fits: bool
    """Whether the failed request succeeds with it, by replaying the tape."""
