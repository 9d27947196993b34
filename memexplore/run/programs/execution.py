"""One execution of a program: its tape, which ends at the request that does not fit, and what was applied."""

from __future__ import annotations

import math
from typing import NamedTuple

from memexplore.run.knobs.applying.report import ApplyReport
from memexplore.run.knobs.knobs import Knobs
from memexplore.run.programs.cost import Cost
from memexplore.tape import Tape


class Execution(NamedTuple):
    """A program that was executed once with some knobs; the tape ends with an `oom` row if it does not fit."""

    knobs: Knobs
    tape: Tape
    applied: ApplyReport
    cost: Cost
    """Of the first step."""
    seconds: float = math.nan
    """Of one step, measured on a real device; not a number where the tape is predicted or ends out of memory."""
    samples: int = 1
    """Samples of one step; of the whole run of a cell or a script, which may make many; 1 where they are unknown."""
