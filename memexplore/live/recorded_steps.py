"""Keep the tapes of recorded steps in bounded memory, and compare two of them."""

from __future__ import annotations

from collections.abc import Sequence

from memexplore.analysis.difference import diff
from memexplore.analysis.groups import UNKNOWN_LINE
from memexplore.analysis.places import name_cells
from memexplore.live.recording import Recording
from memexplore.tape import Tape
from memexplore.text.units import size_text

MOST_TAPES = 24
MOST_ROWS = 4_000_000
"""Rows of all kept tapes; a row takes about 50 bytes."""
MOST_EVENTS = 200_000
"""Events of all recordings whose tapes are not built yet."""


class RecordedSteps:
    """The tapes of the first step, of the step with the highest peak, of the newest steps and of others in between."""

    def __init__(self, most: int = MOST_TAPES, most_rows: int = MOST_ROWS) -> None:
        self._most, self._most_rows = most, most_rows
        self._kept: dict[int, tuple[int, Recording]] = {}
        """Step -> its peak, and its recording."""

    def add(self, recording: Recording, peak: int) -> None:
        """Keep a step with a peak; of the older ones every second is dropped when there are too many."""
        # In one assignment, because other threads read.
        self._kept = kept = {**self._kept, recording.step: (peak, recording)}
        if len(kept) > self._most or sum(len(recording) for _, recording in kept.values()) > self._most_rows:
            steps = list(kept)
            stay = {steps[0], self._highest(steps), *steps[-2:]}
            dropped = {step for step in steps if step not in stay}
            dropped = set(sorted(dropped)[::2])
            self._kept = kept = {step: entry for step, entry in kept.items() if step not in dropped}
        unbuilt = [recording for _, recording in kept.values() if not recording.is_built]
        while unbuilt and sum(map(len, unbuilt)) > MOST_EVENTS:
            # Events take ten times the memory of a tape.
            _ = unbuilt.pop(0).tape

    def _highest(self, steps: Sequence[int]) -> int:
        return max(steps, key=lambda step: self._kept[step][0], default=0)

    def steps(self) -> list[int]:
        """Return the steps whose tapes are kept, in order."""
        return list(self._kept)

    def tape(self, step: int) -> Tape | None:
        """Return the tape of a step, None where it is not kept."""
        entry = self._kept.get(step)
        return None if entry is None else entry[1].tape

    def newest(self) -> Tape | None:
        """Return the tape of the step recorded last."""
        return self.tape(max(self._kept, default=0))

    def highest_before(self, step: int) -> int:
        """Return the recorded step with the highest peak before a step, 0 if there is none."""
        return self._highest([recorded for recorded in self._kept if recorded < step])

    def difference(self, before: int, after: int) -> str:
        """Return what one recorded step has allocated more at its peak than another, "" if nothing."""
        first, second = self.tape(before), self.tape(after)
        if first is None or second is None:
            return ""
        table = diff(first, second)
        # What a step allocates is older in the next one, and in no layer: the sum of a category says whether it grew.
        sums = table.groupby("category")["difference"].sum()
        if not len(sums) or sums.max() <= 0:
            return ""
        category = str(sums.idxmax())
        largest = table[table["category"] == category].sort_values("difference", ascending=False).iloc[0]
        size = int(min(largest["difference"], sums.max()))
        line = f"({name_cells(largest['line'])})" if largest["line"] not in ("", UNKNOWN_LINE) else ""
        place = " ".join(filter(None, (largest["layer"], line)))
        where = f" in {place}" if place else ""
        return f"{size_text(size)} more {category}{where} in step {after}"
