"""Content of the verdict bar: from a Tape to the dictionary `Verdict` of ``frontend/types.d.ts``."""

from __future__ import annotations

from typing import Any

from memexplore.analysis import curves, groups, summary
from memexplore.analysis.verdict import Verdict, failed_request, verdict
from memexplore.notebook.cursor_details import name_cells
from memexplore.tape import Tape

_TIGHT = 0.05
"""Share of the capacity below which a margin is called tight."""
_LEVELS = {Verdict.FITS: "fits", Verdict.OOM: "oom", Verdict.NOT_ON_GPU: "none"}


def verdict_content(tape: Tape) -> dict[str, Any]:
    """Return level, sentences, places in the code, and bytes reserved, needed and available."""
    headline, detail, *_ = [*name_cells(summary.sentence(tape)).splitlines(), ""]
    used, capacity = curves.peak(tape, "reserved")[0], tape.meta.capacity
    failed = failed_request(tape)
    level = _LEVELS.get(verdict(tape), "error")
    if level == "fits" and capacity is not None and capacity - used < _TIGHT * capacity:
        level = "tight"
    text = name_cells(groups.ending_text(tape))
    return {
        "level": level,
        "headline": headline,
        "detail": detail,
        "where": [{"text": text, "code": "", "path": ""}] if text else [],
        "used": used,
        "capacity": capacity,
        "needed": used + int(tape.size[failed]) if failed >= 0 else used,
        "device": tape.meta.gpu or tape.meta.device,
    }
