"""Folders of ranks that were recorded one by one: a tape goes in; the folder of its rank comes out, for `Ranks`.

The folder has a row for each step and the tape of the whole run, named after the step with the highest peak.
"""

from __future__ import annotations

import os

import numpy as np

from memexplore.analysis.curves import curve
from memexplore.runs.rows import StepRow
from memexplore.runs.writer import Writer
from memexplore.tape import Ending, Tape

_ENDED, _FAILED = "ended", "failed"
_PEAK_FROM = "recorded"


def write_rank(folder: str | os.PathLike[str], rank: int, tape: Tape | None, error: str = "") -> None:
    """Write the folder of a rank from the tape of its whole run; a rank without a tape has its error only.

    Raises FileExistsError if the rank has a folder there already, ValueError for a tape that is not placed.
    """
    about = {} if tape is None else {"device": tape.meta.device, "capacity": tape.meta.capacity}
    writer = Writer(folder, rank, {**about, "notes": [] if tape is None else list(tape.meta.notes)})
    if tape is not None:
        error = error or tape.meta.error
        rows = step_rows(tape)
        for row in rows:
            writer.add(row)
        if rows:
            writer.add_tape(max(rows, key=lambda row: row.peak_allocated or 0).step, tape)
        writer.flush()
        failed = error or tape.meta.ending is Ending.OUT_OF_MEMORY
    else:
        failed = error
    writer.describe(_FAILED if failed else _ENDED, error)


def step_rows(tape: Tape) -> list[StepRow]:
    """Return a row for each step of a tape; step 0, the set-up, only where it has the highest peak of all.

    >>> from memexplore.tape import Meta, Source
    >>> tape = Tape.from_columns({"address": [0, 512, 1024], "size": [10, 20, 30], "step": [0, 1, 2]},
    ...                          meta=Meta(Source.PREDICTED, "T4"))
    >>> [(row.step, row.peak_allocated) for row in step_rows(tape)]
    [(1, 1024), (2, 1536)]

    Raises ValueError for a tape that is not placed.
    """
    if not len(tape):
        return []
    allocated, reserved = curve(tape, "allocated"), curve(tape, "reserved")
    found = []
    for step in np.unique(tape.step).tolist():
        at = np.flatnonzero(tape.step == step)
        found.append(
            StepRow(
                step=step,
                seconds=float("nan"),  # the virtual GPU has no clock
                peak_allocated=int(allocated[at].max()),
                peak_reserved=int(reserved[at].max()),
                allocated_after=int(allocated[at[-1]]),
                reserved_after=int(reserved[at[-1]]),
                peak_from=_PEAK_FROM,
                error=tape.meta.error if step == int(tape.step[-1]) else "",
            )
        )
    peaks = [row.peak_allocated or 0 for row in found]
    has_setup = len(found) > 1 and found[0].step == 0 and peaks[0] <= max(peaks[1:])
    return found[1:] if has_setup else found
