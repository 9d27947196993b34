"""Switched settings of a watched run: one `Change` a request, and their table."""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from memexplore.run.knobs.applying.report import ApplyReport
from memexplore.run.knobs.knobs import Knobs

if TYPE_CHECKING:
    import pandas


class ChangeState(enum.StrEnum):
    """What was done with a requested setting."""

    PREDICTING = "predicting"
    """It is run on the virtual GPU first, and requested if it fits."""
    REQUESTED = "requested"
    """It takes effect at the end of the step that runs."""
    APPLIED = "applied"
    UNDONE = "undone"
    """It failed or was replaced by a later request before it took effect, and the setting before it stayed."""
    REFUSED = "refused"
    """A locked knob, a setting that contradicts itself, or one that does not fit or may not: nothing was changed."""


@dataclasses.dataclass
class Change:
    """A requested setting; sizes in bytes."""

    knobs: Knobs
    step: int
    """The first step with the setting; until it takes effect, the step in which it was requested."""
    state: ChangeState = ChangeState.REQUESTED
    reason: str = ""
    """Why it was undone or refused."""
    predicted_peak: int | None = None
    """Peak allocated of a step with the setting on the virtual GPU, None where it is not known."""
    measured_peak: int | None = None
    """Peak allocated of the first complete step with the setting."""
    effect: ApplyReport = dataclasses.field(default_factory=ApplyReport)
    """What was changed in the models, what was skipped and why, and notes."""

    def end(self, state: ChangeState, reason: str) -> None:
        """Set the state and the reason for it."""
        # The reason first: other threads read.
        self.reason = reason
        self.state = state


def table(changes: Iterable[Change]) -> pandas.DataFrame:
    """Return changes as a DataFrame; sizes are nullable integers.

    >>> table([Change(Knobs(checkpoint="sqrt"), 7)])[["step", "setting", "state"]].to_numpy().tolist()
    [[7, 'checkpoint sqrt', 'requested']]
    """
    import pandas

    rows = list(changes)
    columns: dict[str, Any] = {
        "step": [row.step for row in rows],
        "setting": [str(row.knobs) for row in rows],
        "predicted_peak": pandas.array([row.predicted_peak for row in rows], dtype="Int64"),
        "measured_peak": pandas.array([row.measured_peak for row in rows], dtype="Int64"),
        "state": [row.state.value for row in rows],
        "reason": [row.reason for row in rows],
        "effect": ["; ".join((*row.effect.texts, *row.effect.notes)) for row in rows],
    }
    return pandas.DataFrame(columns)
