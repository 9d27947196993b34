"""A change of the code that a post-mortem proposes."""

from __future__ import annotations

from typing import NamedTuple

from memexplore.run.knobs.knobs import KNOBS


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
    knobs: tuple[str, ...] = ()
    """Names of the knobs that do the same, in the order of the text."""

    @property
    def costs(self) -> str:
        """What it costs, as a sentence from what the knobs say; empty where no knob does the same.

        >>> Suggestion("Let segments grow.", "", 0, True, ("settings",)).costs
        'It costs: settings (equal results).'
        """
        each = [f"{KNOBS[name].noun} ({KNOBS[name].costs})" for name in self.knobs]
        return f"It costs: {', '.join(each)}." if each else ""
