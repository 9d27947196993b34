"""Write settings that would have fitted into a person's own lines: a script, or the cell that failed."""

from __future__ import annotations

import contextlib
from typing import NamedTuple

from memexplore.analysis.verdict_content import TIGHT
from memexplore.out_of_memory.what_fits import WhatFits
from memexplore.run.code.diff import source_diff
from memexplore.run.code.own_code import OwnCode
from memexplore.run.code.own_lines import changed_source
from memexplore.run.code.own_loop import Unclear
from memexplore.run.search.advice import Option

_FEW_LINES = 12
"""Lines that a small change adds at most."""


class ChangedCode(NamedTuple):
    """A source with the lines of a setting."""

    number: int
    """Of the setting among those that would have fitted, counted from 1."""
    option: Option
    source: str
    diff: str
    """Against the source as written, as in the explorer's Code tab."""

    @property
    def rank(self) -> tuple[bool, bool, bool, int]:
        """What trains the same comes first, then what leaves more than a little, then what changes few lines."""
        outcome = self.option.outcome
        is_tight = outcome.margin < TIGHT * outcome.capacity
        return self.option.alters, is_tight, self.diff.count("\n+") > _FEW_LINES, self.number


def changed_codes(own: OwnCode, what_fits: WhatFits) -> list[ChangedCode]:
    """Return the settings that can be written into the lines of a source, the smallest change first."""
    result = []
    for number, option in enumerate(what_fits.options, 1):
        # The step as it stands needs no change, and another GPU is no change of the source.
        if option.knobs.gpu is None and option.knobs.changed():
            with contextlib.suppress(Unclear):
                source = changed_source(own, option.knobs)
                result.append(ChangedCode(number, option, source, source_diff(own, source)))
    return sorted(result, key=lambda code: code.rank)
