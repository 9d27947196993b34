"""Background work of the explorer: the follow-up of a run, and runs ahead of a request."""

from __future__ import annotations

from typing import Any

import pytest

from memexplore.jupyter import explorer as explorer_module
from memexplore.jupyter import results, static_output, tabs
from memexplore.jupyter.explore import explore
from memexplore.jupyter.explorer import Explorer
from memexplore.jupyter.main_thread import MainThread
from memexplore.run.knobs.knobs import Knobs
from tests.jupyter.explorer_actions import Loop, row, send, step, turn


@pytest.fixture
def shown() -> Explorer:
    return explore(step())


def test_only_the_last_of_several_changes_is_run(shown: Explorer, monkeypatch: pytest.MonkeyPatch) -> None:
    loop = Loop()
    monkeypatch.setattr(shown._thread, "_loop", loop)
    for batch in ("1", "2", "4", "8"):
        turn(shown, "batch", batch)
    assert shown.knobs == Knobs(batch=8)
    assert shown.run.knobs == Knobs()
    loop.run()
    assert shown.run.knobs == Knobs(batch=8)
    assert shown.history == (Knobs(), Knobs(batch=8))


def test_follow_up_of_a_replaced_setting_is_cancelled(shown: Explorer, monkeypatch: pytest.MonkeyPatch) -> None:
    loop, sent = Loop(), []
    monkeypatch.setattr(shown._thread, "_loop", loop)
    monkeypatch.setattr(shown.view, "send_details", lambda: sent.append(shown.run.knobs.batch))
    turn(shown, "batch", "1")
    loop.waiting.pop(0)()  # draws; the follow-up is scheduled
    turn(shown, "batch", "2")
    loop.pass_time(2)
    assert sent == [2]


def test_follow_up_waits_for_the_browser_at_most_a_second(shown: Explorer, monkeypatch: pytest.MonkeyPatch) -> None:
    loop, sent = Loop(), []
    monkeypatch.setattr(shown._thread, "_loop", loop)
    monkeypatch.setattr(shown.view, "send_details", lambda: sent.append(shown.run.knobs.batch))
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
    assert shown.run.knobs == Knobs(batch=8)


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
    assert shown.run.knobs == Knobs(batch=8)
    send(shown, "undo")
    assert shown.run.knobs == Knobs()
    assert not shown.message()["can_undo"]
    shown.redo()
    assert shown.run.knobs == Knobs(batch=8)
    assert shown.message()["can_redo"]


def test_failing_field_among_several_is_found(shown: Explorer, monkeypatch: pytest.MonkeyPatch) -> None:
    loop = Loop()
    monkeypatch.setattr(shown._thread, "_loop", loop)
    # three requests arrive while the kernel is busy; the second cannot be applied
    turn(shown, "precision", "bf16 autocast")
    turn(shown, "frozen", "nowhere")
    turn(shown, "batch", "32")
    loop.run()
    assert shown.knobs == shown.run.knobs == Knobs(precision="bf16", batch=32)
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
    assert shown.knobs == shown.run.knobs == Knobs(frozen="0", precision="bf16", batch=32)
    # all changes, without the last one, and the setting wanted then
    assert len(runs) == 3


def test_refused_request_does_not_stop_the_follow_up(shown: Explorer, monkeypatch: pytest.MonkeyPatch) -> None:
    loop, sent = Loop(), []
    monkeypatch.setattr(shown._thread, "_loop", loop)
    monkeypatch.setattr(shown.view, "send_details", lambda: sent.append(shown.run.knobs))
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


def test_old_results_outside_of_the_history_are_forgotten(shown: Explorer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(results, "_MAX_OTHERS", 2)
    for batch in ("1", "2", "4", "8", "16"):
        turn(shown, "batch", batch, drag="first")
        if batch == "1":
            send(shown, "pin")
    # as written, the pinned one, the last two on the way, and the last of the drag
    assert [knobs.batch for knobs in shown._results] == [None, 1, 4, 8, 16]
    send(shown, "undo")
    assert shown.run.knobs == Knobs()


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
    assert (shown.run.knobs, shown.message()["can_undo"]) == (Knobs(), False)


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
    assert (shown.run.knobs, shown.message()["can_undo"]) == (Knobs(), False)


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


def test_every_still_picture_follows_the_setting(shown: Explorer, monkeypatch: pytest.MonkeyPatch) -> None:
    class Display:
        def __init__(self) -> None:
            self.texts: list[str] = []

        def update(self, output: dict[str, str], raw: bool) -> None:
            self.texts.append(output["text/plain"])

    made: list[Display] = []

    def display(data: Any, *, display_id: bool = False, **options: Any) -> Display | None:
        if not display_id:
            return None
        made.append(Display())
        return made[-1]

    for module in (explorer_module, static_output):
        monkeypatch.setattr(module, "display", display)
    for _ in range(2):
        shown._ipython_display_()
    turn(shown, "batch", "32")
    assert [["Batch of 32" in text for text in one.texts] for one in made] == [[True], [True]]
