"""Tell what the calls of modules that have ended have made from what the running ones use."""

from __future__ import annotations

import numpy as np

from memexplore.analysis.curves import Rows
from memexplore.tape import Action, Tape


def of_ended_calls(tape: Tape, rows: Rows) -> Rows:
    """Return the rows of calls that have ended: what a call makes is an activation only when its module has ended."""
    last = len(tape) - 1
    same = (tape.op == tape.op[last]) & (tape.module == tape.module[last]) & (tape.action == Action.ALLOC)
    before = int(np.flatnonzero(same)[-1]) if same.any() else -1
    name = tape.modules[tape.module[last]] if tape.module[last] >= 0 else ""
    running = [
        number
        for number, module_name in enumerate(tape.modules)
        if name == module_name or name.startswith(f"{module_name}.")
    ]
    # The outermost module has the name of its class.
    running += [
        number
        for number, module_name in enumerate(tape.classes)
        if tape.modules[number].partition("#")[0] == module_name
    ]
    return rows[~np.isin(tape.module[rows], running) | (rows <= before)]
