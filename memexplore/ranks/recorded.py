"""A rank that was recorded as a whole: one tape, whose header says what its steps come to."""

from __future__ import annotations

from pathlib import Path

from memexplore.ranks.descriptions import About
from memexplore.ranks.rows import StepRow, totals_of
from memexplore.tape import Ending, Tape
from memexplore.tape.file import Header, read_header

_ENDED, _FAILED = "ended", "failed"
_PEAK_FROM = "recorded"


class RecordedRank:
    """The file of one rank."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def about(self) -> About:
        """Return what the header of the tape says about the rank."""
        try:
            header = read_header(str(self.path))
        except (ValueError, OSError):
            return About(error="its tape cannot be read", totals=totals_of([]))
        meta = header.meta
        failed = bool(meta.error) or meta.ending is Ending.OUT_OF_MEMORY
        return About(
            device=meta.device,
            capacity=meta.capacity,
            state=_FAILED if failed else _ENDED,
            error=meta.error,
            notes=meta.notes,
            totals=totals_of(step_rows(header)),
        )

    def rows(self) -> list[StepRow]:
        """Return the rows of its steps. Raises ValueError if the file cannot be read."""
        return step_rows(read_header(str(self.path)))

    def recorded(self) -> list[int]:
        """Return the step with the highest peak, which stands for the tape of the whole run."""
        peak_step = totals_of(self.rows()).peak_step
        return [] if peak_step is None else [peak_step]

    def tape(self, step: int) -> Tape:
        """Return the tape of the whole run, which has every step."""
        return Tape.load(self.path)


def step_rows(header: Header) -> list[StepRow]:
    """Return a row for each step of a tape; step 0, the set-up, only where it has the highest peak of all."""
    steps = () if header.peaks is None else header.peaks.steps
    rows = [
        StepRow(
            step=step.step,
            seconds=float("nan"),  # the virtual GPU has no clock
            peak_allocated=step.allocated,
            peak_reserved=step.reserved,
            allocated_after=step.allocated_after,
            reserved_after=step.reserved_after,
            peak_from=_PEAK_FROM,
        )
        for step in steps
    ]
    if rows:
        rows[-1] = rows[-1]._replace(error=header.meta.error)
    has_setup = (
        len(steps) > 1 and steps[0].step == 0 and steps[0].allocated <= max(step.allocated for step in steps[1:])
    )
    return rows[1:] if has_setup else rows
