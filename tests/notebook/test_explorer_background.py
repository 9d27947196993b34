"""Background work of the explorer: the follow-up of a run, runs ahead of a request, and the search."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from memexplore.knobs.knobs import Knobs
from memexplore.notebook import tabs
from memexplore.notebook.explore import explore
from memexplore.notebook.explorer import Explorer
from memexplore.notebook.main_thread import MainThread
from memexplore.search.advise import advise
from memexplore.search.progress import Progress
from tests.notebook.explorer_actions import step, turn


@pytest.fixture
def shown() -> Explorer:
    return explore(step())


class Loop:
    """An event loop that runs its callbacks on request."""

    def __init__(self) -> None:
        self.waiting: list[Callable[[], Any]] = []
        self.later: list[tuple[float, Callable[[], Any]]] = []

    def add_callback(self, action: Callable[[], Any]) -> None:
        self.waiting.append(action)

    def call_later(self, seconds: float, action: Callable[[], Any]) -> None:
        self.later.append((seconds, action))

    def run(self) -> None:
        while self.waiting:
            self.waiting.pop(0)()

    def pass_time(self, seconds: float) -> None:
        """Run the callbacks that are due some seconds after they were scheduled."""
        self.run()
        due = [action for after, action in self.later if after <= seconds]
        self.later = [(after, action) for after, action in self.later if after > seconds]
        for action in due:
            action()
        self.run()


def test_only_the_last_of_several_changes_is_run(shown: Explorer, monkeypatch: pytest.MonkeyPatch) -> None:
    loop = Loop()
    monkeypatch.setattr(shown._thread, "_loop", loop)
    for batch in (1, 2, 4, 8):
        turn(shown, "batch", batch)
    assert shown.knobs == Knobs(batch=8)
    assert shown.trial.knobs == Knobs()
    loop.run()
    assert shown.trial.knobs == Knobs(batch=8)
    assert shown.history == (Knobs(), Knobs(batch=8))


def test_follow_up_of_a_replaced_setting_is_cancelled(shown: Explorer, monkeypatch: pytest.MonkeyPatch) -> None:
    loop, sent = Loop(), []
    monkeypatch.setattr(shown._thread, "_loop", loop)
    monkeypatch.setattr(shown.view, "send_details", lambda: sent.append(shown.trial.knobs.batch))
    turn(shown, "batch", 1)
    loop.waiting.pop(0)()  # draws; the follow-up is scheduled
    turn(shown, "batch", 2)
    loop.pass_time(2)
    assert sent == [2]


def test_follow_up_waits_for_the_browser_at_most_a_second(shown: Explorer, monkeypatch: pytest.MonkeyPatch) -> None:
    loop, sent = Loop(), []
    monkeypatch.setattr(shown._thread, "_loop", loop)
    monkeypatch.setattr(shown.view, "send_details", lambda: sent.append(shown.trial.knobs.batch))
    turn(shown, "batch", 1)
    loop.pass_time(0.9)
    assert sent == []
    shown.view._handle_custom_msg({"type": "drawn", "tape": shown.view._screen.tape_number}, [])
    loop.pass_time(0.1)
    assert sent == [1]
    # without a browser no request comes
    turn(shown, "batch", 2)
    loop.pass_time(1)
    assert sent == [1, 2]


def test_prefetch_runs_a_neighbour_and_stops_at_an_event(shown: Explorer, monkeypatch: pytest.MonkeyPatch) -> None:
    turn(shown, "batch", 32)
    monkeypatch.setattr(MainThread, "has_pending_events", lambda _: False)
    shown._prefetch(shown._shown)
    assert Knobs(batch=16) in shown._results
    assert shown.history == (Knobs(), Knobs(batch=32))
    turn(shown, "batch", 16)
    # idle at first, then an event arrives during the run
    answers = iter([False, False, False, *[True] * 1000])
    monkeypatch.setattr(MainThread, "has_pending_events", lambda _: next(answers))
    shown._prefetch(shown._shown)
    assert Knobs(batch=8) not in shown._results
    turn(shown, "batch", 8)
    assert shown.trial.knobs == Knobs(batch=8)


def test_click_in_the_advice_uses_a_setting(shown: Explorer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shown, "_search", lambda knobs, report: advise(step(), budget=6, progress=report))
    shown._advise_button.click()
    rows = shown.view._tabs[tabs.ADVICE]["rows"]
    assert rows
    assert shown._advise_button.description == "What would fit?"
    shown.view._handle_custom_msg({"type": "tab click", "tab": tabs.ADVICE, "row": len(rows) - 1}, [])
    assert str(shown.trial.knobs) == rows[-1]["cells"][0]


def test_changed_control_cancels_the_search(shown: Explorer, monkeypatch: pytest.MonkeyPatch) -> None:
    def search(knobs: Knobs, report: Callable[[Any], object]) -> Any:
        shown._is_requested = True
        report(Progress(1, 0, 10, 1.0, None))
        raise AssertionError("the search went on")

    monkeypatch.setattr(shown, "_search", search)
    shown._advise()
    assert tabs.ADVICE not in shown.view._tabs
