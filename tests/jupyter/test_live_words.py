"""The words of a watched run's page."""

from __future__ import annotations

import pytest

from memexplore.jupyter.live_message import marks, words
from memexplore.live.live import State
from memexplore.ranks.rows import StepRow

ERROR = "ValueError: too small (/tmp/ipykernel_7/1129287216.py:4)"
BAR = {"capacity": None, "device": "cpu", "overhead": 0.0, "leak": None, "held_by": (), "notes": ()}


@pytest.mark.parametrize(
    ("state", "headline"), [(State.WATCHING, "Waiting for the first step"), (State.ENDED, "No step")]
)
def test_a_run_that_ended_waits_for_no_step(state: State, headline: str) -> None:
    assert words(state, [], None, error="", **BAR)["headline"] == headline


def test_an_error_names_its_cell_as_a_traceback_does() -> None:
    row = StepRow(1, 0.1, error=ERROR)
    named = "ValueError: too small (Cell, line 4)"
    assert words(State.FAILED, [row], None, error=ERROR, **BAR)["error"] == named
    assert marks([row])[0]["text"] == named
