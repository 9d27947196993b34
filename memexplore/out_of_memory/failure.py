"""End the tape of a failure that was not recorded with the request that failed."""

from __future__ import annotations

import numpy as np

from memexplore.analysis.verdict import failed_request
from memexplore.out_of_memory.evidence_types import Evidence
from memexplore.tape import Action, Category, Ending, Frame, Tape

NOTE = "The failure was not recorded: the post-mortem shows what was allocated when it was noticed."


def with_failure(tape: Tape, evidence: Evidence) -> Tape:
    """Return a tape that ends with the failed request of an error, if it does not have the request already."""
    requested = evidence.message.requested
    if failed_request(tape) >= 0 or requested is None:
        return tape
    line, _, number = evidence.line.rpartition(":")
    stacks = [*tape.stacks, (Frame(line, int(number), ""),)] if number.isdecimal() else [*tape.stacks]
    modules = [*tape.modules, evidence.layer] if evidence.layer else [*tape.modules]
    last = {
        "time": int(tape.time[-1]) if len(tape) else 0,
        "action": Action.OOM,
        "address": -1,
        "size": requested,
        "category": Category.UNKNOWN,
        "step": int(tape.step[-1]) if len(tape) else 0,
        "phase": int(evidence.phase),
        "op": -1,
        "module": len(tape.modules) if evidence.layer else -1,
        "stack": len(tape.stacks) if number.isdecimal() else -1,
        "tensor": -1,
        "workspace": -1,
        "stream": 0,
    }
    columns = {name: np.append(getattr(tape, name), value) for name, value in last.items()}
    meta = tape.meta._replace(ending=Ending.OUT_OF_MEMORY, notes=(*tape.meta.notes, NOTE))
    classes = [*tape.classes, ""] if evidence.layer and tape.classes else list(tape.classes)
    return tape.with_rows(columns, modules=modules, classes=classes, stacks=stacks, meta=meta)
