"""Background work of the explorer: the follow-up of a run, runs ahead of a request, and the search."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest

from memexplore.knobs.knobs import Knobs
from memexplore.notebook import tabs
from memexplore.notebook.explore import explore
from memexplore.notebook.explorer import Explorer
from memexplore.notebook.explorer_search import Stop
from memexplore.notebook.main_thread import MainThread
from memexplore.search.advice import Advice
from memexplore.search.advise import advise
from memexplore.search.beside import Found, Report
from memexplore.search.progress import Progress
from tests.notebook.explorer_actions import row, send, step, turn


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
    for batch in ("1", "2", "4", "8"):
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
    turn(shown, "batch", "1")
    loop.waiting.pop(0)()  # draws; the follow-up is scheduled
    turn(shown, "batch", "2")
    loop.pass_time(2)
    assert sent == [2]


def test_follow_up_waits_for_the_browser_at_most_a_second(shown: Explorer, monkeypatch: pytest.MonkeyPatch) -> None:
    loop, sent = Loop(), []
    monkeypatch.setattr(shown._thread, "_loop", loop)
    monkeypatch.setattr(shown.view, "send_details", lambda: sent.append(shown.trial.knobs.batch))
    turn(shown, "batch", "1")
    loop.pass_time(0.9)
    assert sent == []
    shown.view._handle_custom_msg({"type": "drawn", "tape": shown.view._screen.tape_number}, [])
    loop.pass_time(0.1)
    assert sent == [1]
    # without a browser no request comes
    turn(shown, "batch", "2")
    loop.pass_time(1)
    assert sent == [1, 2]


def test_prefetch_runs_a_neighbour_and_stops_at_an_event(shown: Explorer, monkeypatch: pytest.MonkeyPatch) -> None:
    turn(shown, "batch", "32")
    monkeypatch.setattr(MainThread, "has_pending_events", lambda _: False)
    shown._prefetch(shown._shown)
    assert Knobs(batch=16) in shown._results
    assert shown.history == (Knobs(), Knobs(batch=32))
    turn(shown, "batch", "16")
    # idle at first, then an event arrives during the run
    answers = iter([False, False, False, *[True] * 1000])
    monkeypatch.setattr(MainThread, "has_pending_events", lambda _: next(answers))
    shown._prefetch(shown._shown)
    assert Knobs(batch=8) not in shown._results
    turn(shown, "batch", "8")
    assert shown.trial.knobs == Knobs(batch=8)


def test_messages_agree_with_what_is_drawn(shown: Explorer, monkeypatch: pytest.MonkeyPatch) -> None:
    loop, sent = Loop(), []
    monkeypatch.setattr(shown._thread, "_loop", loop)
    monkeypatch.setattr(shown.view, "send", lambda message, *_: sent.append(message))
    send(shown, "knob", field="batch", index=0, drag="", number=7, view="a")
    states = [message["explorer"] for message in sent if message["type"] == "explorer"]
    assert [(one["wanted"], one["shown"], one["working"]) for one in states] == [(1, 0, False)]
    assert states[0]["received"] == {"a": 7}
    loop.run()
    states = [message["explorer"] for message in sent if message["type"] == "explorer"][1:]
    # while the step runs, and after it is drawn
    assert [(one["wanted"], one["shown"], one["working"]) for one in states] == [(1, 0, True), (1, 1, False)]
    kinds = [message["type"] for message in sent]
    assert kinds.index("tape") < len(kinds) - kinds[::-1].index("explorer")


def test_one_drag_is_one_entry_of_history_and_undo(shown: Explorer) -> None:
    for batch in ("32", "16", "8"):
        turn(shown, "batch", batch, drag="first")
    assert shown.history == (Knobs(), Knobs(batch=8))
    turn(shown, "batch", "4", drag="second")
    assert shown.history == (Knobs(), Knobs(batch=8), Knobs(batch=4))
    send(shown, "undo")
    assert shown.trial.knobs == Knobs(batch=8)
    send(shown, "undo")
    assert shown.trial.knobs == Knobs()
    assert not shown.message()["can_undo"]
    shown.redo()
    assert shown.trial.knobs == Knobs(batch=8)
    assert shown.message()["can_redo"]


def test_failing_field_among_several_is_found(shown: Explorer, monkeypatch: pytest.MonkeyPatch) -> None:
    loop = Loop()
    monkeypatch.setattr(shown._thread, "_loop", loop)
    # three requests arrive while the kernel is busy; the second cannot be applied
    turn(shown, "precision", "bf16 autocast")
    turn(shown, "frozen", "nowhere")
    turn(shown, "batch", "32")
    loop.run()
    assert shown.knobs == shown.trial.knobs == Knobs(precision="bf16", batch=32)
    assert "nowhere" in row(shown, "frozen")["problem"]


def test_search_for_the_failing_field_ends_when_another_setting_is_wanted(
    shown: Explorer, monkeypatch: pytest.MonkeyPatch
) -> None:
    loop, runs = Loop(), []
    run_step = shown._run_step

    def run(knobs: Knobs) -> Any:
        runs.append(knobs)
        if len(runs) == 2:
            # The message arrives in another thread during the run without the last change.
            turn(shown, "frozen", "0")
        return run_step(knobs)

    monkeypatch.setattr(shown._thread, "_loop", loop)
    monkeypatch.setattr(shown, "_run_step", run)
    turn(shown, "frozen", "nowhere")
    turn(shown, "precision", "bf16 autocast")
    turn(shown, "batch", "32")
    loop.run()
    assert shown.knobs == shown.trial.knobs == Knobs(frozen="0", precision="bf16", batch=32)
    # all changes, without the last one, and the setting wanted then
    assert len(runs) == 3


def test_refused_request_does_not_stop_the_follow_up(shown: Explorer, monkeypatch: pytest.MonkeyPatch) -> None:
    loop, sent = Loop(), []
    monkeypatch.setattr(shown._thread, "_loop", loop)
    monkeypatch.setattr(shown.view, "send_details", lambda: sent.append(shown.trial.knobs))
    turn(shown, "batch", "32")
    loop.run()
    for delay, action in loop.later:
        if delay == 1:  # the time without a browser
            action()
    loop.later.clear()
    turn(shown, "frozen", "nowhere")
    loop.run()
    assert shown.knobs == Knobs(batch=32)
    assert sent == [Knobs(batch=32)]
    assert len(shown.view._tabs[tabs.HISTORY]["rows"]) == 2


def test_drag_that_ends_where_it_began_leaves_nothing(shown: Explorer) -> None:
    for batch in ("32", "16", "64"):
        turn(shown, "batch", batch, drag="first")
    assert shown.history == (Knobs(),)
    assert not shown.message()["can_undo"]
    # and goes on from there
    for batch in ("8", "4"):
        turn(shown, "batch", batch, drag="first")
    assert shown.history == (Knobs(), Knobs(batch=4))
    send(shown, "undo")
    assert (shown.trial.knobs, shown.message()["can_undo"]) == (Knobs(), False)


def test_refused_position_in_a_drag_leaves_one_entry(shown: Explorer, monkeypatch: pytest.MonkeyPatch) -> None:
    run_step = shown._run_step

    def run(knobs: Knobs) -> Any:
        if knobs.batch == 16:
            raise ValueError("no batch of 16")
        return run_step(knobs)

    monkeypatch.setattr(shown, "_run_step", run)
    for batch in ("32", "16", "8"):
        turn(shown, "batch", batch, drag="first")
    assert shown.history == (Knobs(), Knobs(batch=8))
    send(shown, "undo")
    assert (shown.trial.knobs, shown.message()["can_undo"]) == (Knobs(), False)


def test_click_in_the_advice_uses_a_setting(shown: Explorer) -> None:
    send(shown, "search")
    rows = shown.view._tabs[tabs.ADVICE]["rows"]
    assert rows
    assert shown.message()["search"]["state"] == "done"
    send(shown, "tab click", tab=tabs.ADVICE, row=len(rows) - 1)
    assert str(shown.trial.knobs) == rows[-1]["cells"][0]


class SlowSearch:
    """A search whose reports the test makes."""

    def __init__(self) -> None:
        self.is_stopped = False

    def start(self, knobs: Knobs, report: Report, thread: MainThread) -> Stop:
        self.report = report

        def stop() -> None:
            self.is_stopped = True

        return stop

    def find(self, done: int, advice: Advice) -> None:
        self.report(Found(Progress(done, 0, 10, 1.0, 2.0), advice))


def test_search_streams_goes_on_while_knobs_turn_and_keeps_its_results(
    shown: Explorer, monkeypatch: pytest.MonkeyPatch
) -> None:
    slow, advice = SlowSearch(), advise(step(), budget=3, progress=None)
    monkeypatch.setattr(shown._search, "_begin", slow.start)
    send(shown, "search")
    assert shown.message()["search"]["state"] == "running"
    slow.find(1, advice)
    rows = shown.view._tabs[tabs.ADVICE]["rows"]
    assert [cells["cells"][0] for cells in rows] == [str(option.knobs) for option in advice.options]
    turn(shown, "batch", "32")
    assert not slow.is_stopped
    slow.find(4, advice)
    assert shown.message()["search"]["text"] == "4 of about 10 settings run, about 2 s left"
    send(shown, "stop")
    assert slow.is_stopped
    assert shown.message()["search"] == {
        "state": "stopped",
        "done": 4,
        "planned": 10,
        "seconds_left": None,
        "text": "Stopped after 4 settings",
    }
    # a report that was under way changes nothing
    slow.find(5, advice)
    assert shown.message()["search"]["state"] == "stopped"
    assert [row["cells"] for row in shown.view._tabs[tabs.ADVICE]["rows"]] == [row["cells"] for row in rows]


def test_stop_during_the_start_of_a_second_search_stops_it(shown: Explorer, monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = SlowSearch(), SlowSearch()
    monkeypatch.setattr(shown._search, "_begin", first.start)
    send(shown, "search")
    send(shown, "stop")
    first.is_stopped = False

    def start(knobs: Knobs, report: Report, thread: MainThread) -> Stop:
        # The message arrives in another thread while the search starts.
        send(shown, "stop")
        return second.start(knobs, report, thread)

    monkeypatch.setattr(shown._search, "_begin", start)
    send(shown, "search")
    assert (first.is_stopped, second.is_stopped) == (False, True)
    assert shown.message()["search"]["state"] == "stopped"


def test_request_that_is_sent_again_is_done_once(shown: Explorer) -> None:
    for number in (1, 2, 2, 1):
        send(shown, "layer action", field="frozen", layer=f"{number - 1}", number=number, view="a")
    assert shown.knobs == Knobs(frozen=["0", "1"])
    assert shown.message()["received"] == {"a": 2}
    # another page counts by itself
    send(shown, "undo", number=1, view="b")
    assert shown.knobs == Knobs(frozen=["0"])


def test_request_before_which_another_was_lost_waits_for_it(shown: Explorer) -> None:
    def freeze(layer: str, number: int, after: int) -> None:
        send(shown, "layer action", field="frozen", layer=layer, number=number, after=after, view="a")

    freeze("0", 1, 0)
    # The change with number 2 is lost: the page hears that its undo was not received, and sends both again.
    send(shown, "undo", number=3, after=2, view="a")
    assert (shown.knobs, shown.message()["received"]) == (Knobs(frozen=["0"]), {"a": 1})
    freeze("1", 2, 0)
    send(shown, "undo", number=3, after=2, view="a")
    assert (shown.knobs, shown.message()["received"]) == (Knobs(frozen=["0"]), {"a": 3})
    assert shown.message()["can_redo"]


def test_click_in_the_history_is_received_like_a_knob(shown: Explorer) -> None:
    send(shown, "layer action", field="frozen", layer="0", number=1, view="a")
    # sent twice, as a page does that has not heard of the first one
    for _ in range(2):
        send(shown, "tab click", tab=tabs.HISTORY, row=0, number=2, after=1, view="a")
    assert shown.message()["received"] == {"a": 2}
    assert shown.knobs == Knobs()


def test_click_on_a_row_that_has_moved_means_the_setting_that_was_clicked(
    shown: Explorer, monkeypatch: pytest.MonkeyPatch
) -> None:
    slow, advice = SlowSearch(), advise(step(), budget=1, progress=None)
    (first,) = advice.options
    second = first._replace(outcome=first.outcome._replace(knobs=Knobs(batch=32)))
    monkeypatch.setattr(shown._search, "_begin", slow.start)
    send(shown, "search")
    for options in ((second, first), (first, second)):
        slow.find(6, dataclasses.replace(advice, options=options))
    send(shown, "tab click", tab=tabs.ADVICE, row=0, label="batch 32")
    assert shown.trial.knobs == Knobs(batch=32)


def test_advice_for_another_gpu_stays_on_that_gpu(shown: Explorer, monkeypatch: pytest.MonkeyPatch) -> None:
    turn(shown, "gpu", "A100 40GB · 39.0 GiB")
    slow, advice = SlowSearch(), advise(step(), "A100 40GB", budget=1, progress=None)
    (first,) = advice.options
    second = first._replace(outcome=first.outcome._replace(knobs=Knobs(batch=32)))
    monkeypatch.setattr(shown._search, "_begin", slow.start)
    send(shown, "search")
    slow.find(3, dataclasses.replace(advice, options=(first, second)))
    rows = shown.view._tabs[tabs.ADVICE]["rows"]
    assert [row["cells"][0] for row in rows if row["current"]] == ["as written"]
    send(shown, "tab click", tab=tabs.ADVICE, row=0, label="batch 32")
    assert shown.trial.knobs == Knobs(batch=32, gpu="A100 40GB")
    assert [row["cells"][0] for row in shown.view._tabs[tabs.ADVICE]["rows"] if row["current"]] == ["batch 32"]


def test_trade_offs_have_the_settings_of_the_present_gpu(shown: Explorer, monkeypatch: pytest.MonkeyPatch) -> None:
    turn(shown, "gpu", "A100 40GB · 39.0 GiB")
    slow, advice = SlowSearch(), advise(step(), "A100 40GB", budget=3, progress=None)
    monkeypatch.setattr(shown._search, "_begin", slow.start)
    send(shown, "search")
    slow.find(3, advice)
    send(shown, "stop")
    ids = {name for trace in shown.view._tabs[tabs.TRADE_OFFS]["figure"]["data"] for name in trace.get("ids", ())}
    same = {str(knobs.replace(gpu="A100 40GB")) for knobs in advice.same_training}
    assert ids == same
    assert len(ids) > 1


def test_click_on_a_point_that_has_moved_means_the_setting_that_was_clicked(
    shown: Explorer, monkeypatch: pytest.MonkeyPatch
) -> None:
    slow, advice = SlowSearch(), advise(step(), budget=4, progress=None)
    monkeypatch.setattr(shown._search, "_begin", slow.start)
    send(shown, "search")
    slow.find(4, advice)
    send(shown, "stop")
    (fits,) = (one for one in shown.view._tabs[tabs.TRADE_OFFS]["figure"]["data"] if one["name"] == "fits")
    number, label = fits["customdata"][-1], fits["ids"][-1]
    # A setting that is shown takes a number before those of the search.
    turn(shown, "batch", "32")
    send(shown, "tab click", tab=tabs.TRADE_OFFS, row=number, label=label)
    assert str(shown.trial.knobs) == label
    # one that the chart has lost means nothing
    send(shown, "tab click", tab=tabs.TRADE_OFFS, row=0, label="batch 5")
    assert str(shown.trial.knobs) == label


def test_second_request_of_a_search_keeps_its_advice(shown: Explorer, monkeypatch: pytest.MonkeyPatch) -> None:
    slow, advice = SlowSearch(), advise(step(), budget=1, progress=None)
    monkeypatch.setattr(shown._search, "_begin", slow.start)
    send(shown, "search")
    slow.find(1, advice)
    send(shown, "search")
    assert shown.view._tabs[tabs.ADVICE]["rows"]
