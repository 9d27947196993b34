"""The search of an explorer: its requests, its advice, and clicks on its rows and points."""

from __future__ import annotations

import dataclasses
import threading
from typing import Any

import pytest
import torch
from torch import nn

from memexplore.jupyter import explorer_search, tabs
from memexplore.jupyter.explore import explore
from memexplore.jupyter.explorer import Explorer
from memexplore.jupyter.explorer_search import Stop
from memexplore.jupyter.main_thread import MainThread
from memexplore.run.knobs.knobs import Knobs
from memexplore.run.machine import machine_of
from memexplore.run.programs.step import Step
from memexplore.run.search.advice import Advice
from memexplore.run.search.advise import advise
from memexplore.run.search.progress import Progress
from memexplore.run.search.search_process import Ended, Found, Report
from tests.jupyter.explorer_actions import Loop, send, step, turn


@pytest.fixture
def shown() -> Explorer:
    return explore(step())


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


def test_click_in_the_advice_uses_a_setting(shown: Explorer) -> None:
    send(shown, "search")
    rows = shown.view._tabs[tabs.ADVICE]["rows"]
    assert rows
    assert shown.message()["search"]["state"] == "done"
    send(shown, "tab click", tab=tabs.ADVICE, row=len(rows) - 1)
    assert str(shown.run.knobs) == rows[-1]["cells"][0]


def test_search_is_for_the_batch_and_the_gpu_shown(shown: Explorer) -> None:
    shown.knobs = Knobs(batch=32, gpu="RTX 3060", precision="bf16")
    send(shown, "search")
    tab = shown.view._tabs[tabs.ADVICE]
    assert tab["text"].startswith("With batch 32 it needs ")
    assert "RTX 3060" in tab["text"]
    # The precision is one of the answers; the batch is part of each.
    assert tab["rows"][0]["cells"][0] == "batch 32"
    send(shown, "tab click", tab=tabs.ADVICE, row=0)
    assert shown.run.knobs == Knobs(batch=32, gpu="RTX 3060")


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
    assert shown.message()["search"]["text"] == "4 of about 10 runs, about 2 s left"
    send(shown, "stop")
    assert slow.is_stopped
    assert shown.message()["search"] == {
        "state": "stopped",
        "done": 4,
        "planned": 10,
        "seconds_left": None,
        "text": "Stopped after 4 runs",
    }
    # a report that was under way changes nothing
    slow.find(5, advice)
    assert shown.message()["search"]["state"] == "stopped"
    assert [row["cells"] for row in shown.view._tabs[tabs.ADVICE]["rows"]] == [row["cells"] for row in rows]


def test_while_nothing_fits_the_advice_counts_what_was_tried(shown: Explorer, monkeypatch: pytest.MonkeyPatch) -> None:
    slow, found = SlowSearch(), advise(step(), budget=3, progress=None)
    tried = tuple(outcome._replace(fits=False, capacity=1) for outcome in found.tried)
    advice = dataclasses.replace(found, as_written=tried[0], tried=tried, options=())
    monkeypatch.setattr(shown._search, "_begin", slow.start)
    send(shown, "search")
    for count in (2, 3):
        slow.find(count, dataclasses.replace(advice, tried=tried[:count]))
        assert f"None of the {count} settings tried fits" in shown.view._tabs[tabs.ADVICE]["text"]


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
    assert shown.run.knobs == Knobs(batch=32)


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
    assert shown.run.knobs == Knobs(batch=32, gpu="A100 40GB")
    assert [row["cells"][0] for row in shown.view._tabs[tabs.ADVICE]["rows"] if row["current"]] == ["batch 32"]


def test_stopped_search_says_that_its_list_may_be_incomplete(shown: Explorer, monkeypatch: pytest.MonkeyPatch) -> None:
    slow = SlowSearch()
    monkeypatch.setattr(shown._search, "_begin", slow.start)
    send(shown, "search")
    slow.find(6, advise(step(), budget=1, progress=None))
    send(shown, "stop")
    assert "The search was stopped: there may be better settings." in shown.view._tabs[tabs.ADVICE]["text"]


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
    assert str(shown.run.knobs) == label
    # one that the chart has lost means nothing
    send(shown, "tab click", tab=tabs.TRADE_OFFS, row=0, label="batch 5")
    assert str(shown.run.knobs) == label


def test_second_request_of_a_search_keeps_its_advice(shown: Explorer, monkeypatch: pytest.MonkeyPatch) -> None:
    slow, advice = SlowSearch(), advise(step(), budget=1, progress=None)
    monkeypatch.setattr(shown._search, "_begin", slow.start)
    send(shown, "search")
    slow.find(1, advice)
    send(shown, "search")
    assert shown.view._tabs[tabs.ADVICE]["rows"]


def test_error_of_the_start_of_a_search_is_no_unsendable_step(monkeypatch: pytest.MonkeyPatch) -> None:
    def start(*arguments: Any, **options: Any) -> None:
        raise TypeError("an error of another kind")

    thread = MainThread()
    monkeypatch.setattr(thread, "_loop", Loop())
    monkeypatch.setattr(explorer_search, "SearchProcess", start)
    with pytest.raises(TypeError, match="another kind"):
        explorer_search.search_step(step(), machine_of("T4"), print, thread)


# -- a step that cannot be sent to another process


def step_with_lock() -> Step:
    lock = threading.Lock()

    def loss(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        with lock:
            return nn.functional.cross_entropy(output, target)

    return Step(nn.Linear(64, 10), (torch.zeros(64, 64), torch.zeros(64, dtype=torch.long)), loss=loss)


@pytest.fixture
def loop(monkeypatch: pytest.MonkeyPatch) -> Loop:
    """The event loop of a kernel."""
    loop = Loop()
    monkeypatch.setattr(MainThread, "_loop", loop, raising=False)
    monkeypatch.setattr(MainThread, "__init__", lambda _: None)
    return loop


def test_step_that_cannot_be_sent_is_searched_in_idle_time_one_run_at_a_time(loop: Loop) -> None:
    events: list[Found | Ended] = []
    explorer_search.search_step(step_with_lock(), machine_of("24MiB"), events.append, MainThread())
    assert events == []
    loop.run()
    while not isinstance(events[-1], Ended):
        runs = [event.progress.done for event in events if isinstance(event, Found)]
        assert runs == [*range(1, len(events) + 1)]
        loop.pass_time(1)
    loop.pass_time(1)
    expected = advise(step_with_lock(), "24MiB", progress=None)
    assert events[-1].advice is not None
    assert [option.knobs for option in events[-1].advice.options] == [option.knobs for option in expected.options]


@pytest.mark.parametrize("runs", [0, 1])
def test_search_in_idle_time_that_is_stopped_runs_nothing_more(loop: Loop, runs: int) -> None:
    events: list[Found | Ended] = []
    stop = explorer_search.search_step(step_with_lock(), machine_of("T4"), events.append, MainThread())
    if runs:
        loop.run()
    stop()
    for _ in range(3):
        loop.pass_time(1)
    assert len(events) == runs
