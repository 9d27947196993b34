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
        """What it costs, as a sentence from what the knobs say and from its code; empty where it costs nothing.

        >>> Suggestion("Let segments grow.", "", 0, True, ("settings",)).costs
        'It costs: settings (equal results).'
        >>> Suggestion("Keep copies on the CPU.", "value.detach().cpu()", 0, True).costs
        'It costs: copies to the CPU.'
        """
        each = ["copies to the CPU"] if ".cpu()" in self.code else []
        each += [f"{KNOBS[name].noun} ({KNOBS[name].costs})" for name in self.knobs]
        return f"It costs: {', '.join(each)}." if each else ""
