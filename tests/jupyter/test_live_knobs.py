"""Knobs of a watched run on its page, without a browser."""

from __future__ import annotations

import itertools
from typing import Any

import pytest

from memexplore.jupyter.live_page import SETTINGS
from memexplore.live.live import State
from memexplore.live.watch import watch
from memexplore.run.knobs.knobs import Knobs
from tests.jupyter.watched import Watched
from tests.live.knob_loops import Tight, judged, tight_gpu


@pytest.fixture
def watched(monkeypatch: pytest.MonkeyPatch, every_setting_fits: None) -> Watched:
    """A run of which each step sends a message, and whose settings all fit."""
    return Watched(monkeypatch, 0.0)


def knob(state: dict[str, Any], name: str) -> dict[str, Any]:
    return next(row for row in state["explorer"]["knobs"] if row["field"] == name)


def choose(watched: Watched, name: str, label: str, number: int = 1) -> dict[str, Any]:
    """Choose a position of a knob, and return the state that follows."""
    row = knob(watched.page.message(), name)
    index = row["options"].index(label)
    return watched.ask(type="knob", field=name, index=index, label=label, drag="", number=number, after=number - 1)


def test_a_knob_takes_effect_at_the_next_step(watched: Watched) -> None:
    with watched.run() as loop:
        loop.step()
        state = choose(watched, "checkpoint", "every block")
        assert watched.live.knobs == Knobs(checkpoint="every 1")
        assert watched.live.applied == Knobs()
        assert state["headline"].endswith("at the next step: checkpoint every 1")
        assert [change["field"] for change in state["explorer"]["changes"]] == ["checkpoint"]
        loop.step()
        assert watched.live.applied == Knobs(checkpoint="every 1")
        loop.step()
    state = watched.states()[-1]
    assert "at the next step" not in state["headline"]
    marks = [mark for mark in watched.page.message()["marks"] if mark["kind"] == "knobs"]
    assert [mark["step"] for mark in marks] == [3]
    assert marks[0]["text"].startswith("checkpoint every 1")


def test_the_first_step_with_a_setting_is_recorded_and_shown_over_the_one_before(watched: Watched) -> None:
    with watched.run(first=1, every=1000) as loop:
        loop.step()
        loop.step()
        choose(watched, "checkpoint", "every block")
        loop.step()
        loop.step()
    assert watched.live.recorded == [1, 4]
    assert (watched.page.view.tape, watched.page.view.before) == (watched.live.tape(4), watched.live.tape(1))


def test_a_locked_knob_says_why_and_changes_nothing(watched: Watched) -> None:
    with watched.run() as loop:
        loop.step()
        row = knob(watched.page.message(), "accumulation")
        assert "live.micro_batches" in row["disabled"]
        state = choose(watched, "accumulation", "2")
        assert "live.micro_batches" in knob(state, "accumulation")["problem"]
        assert watched.live.knobs == Knobs()


def test_undo_and_reset_return_to_the_model_as_written(watched: Watched) -> None:
    with watched.run() as loop:
        loop.step()
        choose(watched, "checkpoint", "every block")
        loop.step()
        state = watched.ask(type="undo", number=2, after=1)
        assert watched.live.knobs == Knobs()
        assert state["explorer"]["can_redo"]
        loop.step()
        assert watched.live.applied == Knobs()


def test_a_setting_that_code_assigns_is_shown(watched: Watched) -> None:
    with watched.run() as loop:
        loop.step()
        watched.live.knobs = Knobs(checkpoint="every 1")
        loop.step()
        sent = [state["explorer"] for state in watched.states() if "explorer" in state]
    assert [change["field"] for change in sent[-1]["changes"]] == ["checkpoint"]


def test_a_selected_layer_is_checkpointed_by_its_button(watched: Watched) -> None:
    with watched.run() as loop:
        loop.step()
        state = watched.ask(type="layer action", field="checkpoint", layer="0", number=1, after=0)
        assert watched.live.knobs.checkpoint.layers == ("0",)
        actions = {action["field"]: action for action in state["explorer"]["layer"]["actions"]}
        assert set(actions) == {"checkpoint", "frozen", "lora"}


def test_the_settings_are_a_table_with_what_was_measured(watched: Watched) -> None:
    with watched.run() as loop:
        loop.step()
        choose(watched, "checkpoint", "every block")
        loop.step()
        loop.step()
    tabs = [tab for message in watched.browser.messages if message["type"] == "tabs" for tab in message["tabs"]]
    rows = [tab for tab in tabs if tab["name"] == SETTINGS][-1]["rows"]
    step, setting, _, measured, state = rows[0]["cells"]
    assert (step, setting, state) == ("3", "checkpoint every 1", "applied")
    assert measured.endswith("MiB")


def test_a_request_that_came_before_is_not_taken_again(watched: Watched) -> None:
    with watched.run() as loop:
        loop.step()
        choose(watched, "checkpoint", "every block")
        watched.live.knobs = Knobs()
        choose(watched, "checkpoint", "every block", number=1)
        assert watched.live.knobs == Knobs()


# --- a run of hours


FOUR_REQUESTS = ("checkpoint", "none"), ("accumulation", "4"), ("checkpoint", "none"), ("accumulation", "1")
"""The first and the last do not fit, and are refused."""


def test_twenty_changes_of_sliders_never_end_a_run_of_a_thousand_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    watched, results, numbers = Watched(monkeypatch, 0.1), [], itertools.count(1)
    with tight_gpu():
        loop = Tight()

        def step() -> None:
            loop.step_of(watched.live)

        with watch(loop.model, loop.optimizer, step=loop.written(), on_begin=[watched.show]) as live:
            for _ in range(4):
                for name, label in FOUR_REQUESTS:
                    for _ in range(20):
                        step()
                    choose(watched, name, label, number=next(numbers))
                    results.append(judged(live, step))
                number = next(numbers)
                watched.ask(type="reset all", number=number, after=number - 1)
                results.append(judged(live, step))
            while live.steps()["step"].iloc[-1] < 1000:
                step()
    assert results == ["refused", "applied", "applied", "refused", "applied"] * 4
    assert live.state is State.ENDED
    assert live.steps()["step"].iloc[-1] == 1000
    refused = live.changes()["state"] == "refused"
    assert live.changes()["reason"][refused].str.endswith(" are missing.").all()
