"""Messages of a watched run to its page, and the page's requests, without a browser."""

from __future__ import annotations

import threading
import time
from typing import Any

import pytest

import memexplore as mx
from memexplore.jupyter import live_leak, live_message, live_page
from memexplore.jupyter.live_page import LAYERS, RISES
from memexplore.live.live import State
from memexplore.ranks.rows import StepRow
from tests.jupyter.magics_shell import Shell
from tests.jupyter.watched import Watched


@pytest.fixture
def watched(monkeypatch: pytest.MonkeyPatch) -> Watched:
    """A run of which each step sends a message."""
    return Watched(monkeypatch, 0.0)


@pytest.fixture
def slow(monkeypatch: pytest.MonkeyPatch) -> Watched:
    """A run of which no step sends a message, because the next message comes in an hour."""
    return Watched(monkeypatch, 3600.0)


def steps_sent(states: list[dict[str, Any]]) -> list[int]:
    """The steps as the page has them: all steps in bins replace earlier ones, new ones are appended."""
    found: list[int] = []
    for state in states:
        if "base" in state:
            found = [int(step) for step in state["base"]["last"]]
        else:
            found += [int(step) for step in state["new"]["last"] if step > (found[-1] if found else 0)]
    return found


def test_the_page_has_the_peak_of_every_step(watched: Watched) -> None:
    with watched.run() as loop:
        for batch in (8, 8, 16, 8):
            loop.step(batch)
    states = watched.states()
    assert steps_sent(states) == [1, 2, 3, 4]
    sent = [peak for state in states for peak in state.get("new", {}).get("peak", [])]
    assert sent == watched.live.steps()["peak_allocated"].tolist()


def test_a_step_sends_its_row_alone(watched: Watched) -> None:
    with watched.run() as loop:
        loop.step()
        loop.step()
        watched.browser.messages.clear()
        loop.step()
        (state,) = watched.states()
    assert (state["first_step"], list(state["new"]["last"])) == (2, [3.0])


def test_steps_within_the_least_time_are_sent_together_at_the_end(slow: Watched) -> None:
    with slow.run() as loop:
        loop.step()  # the first one is sent at once
        slow.browser.messages.clear()
        for _ in range(5):
            loop.step()
        assert slow.states() == []
    (state,) = slow.states()
    assert list(state["new"]["last"]) == [2.0, 3.0, 4.0, 5.0, 6.0]
    assert state["state"] == State.ENDED


def test_steps_are_sent_although_no_further_step_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    watched = Watched(monkeypatch, 0.05)
    with watched.run() as loop:
        for _ in range(3):
            loop.step()
        end = time.monotonic() + 60
        while steps_sent(watched.states()) != [1, 2, 3] and time.monotonic() < end:
            time.sleep(0.01)
        assert steps_sent(watched.states()) == [1, 2, 3]


def test_a_hidden_page_gets_nothing_until_it_is_seen_again(watched: Watched) -> None:
    with watched.run() as loop:
        loop.step()
        watched.ask(type="live visible", visible=False)
        watched.browser.messages.clear()
        loop.step()
        loop.step()
        assert watched.browser.messages == []
        state = watched.ask(type="live visible", visible=True)
    assert list(state["new"]["last"]) == [2.0, 3.0]


def test_a_run_that_ends_unseen_shows_its_newest_recorded_step(watched: Watched) -> None:
    with watched.run(first=3, every=1000) as loop:
        loop.step()
        watched.ask(type="live visible", visible=False)
        for _ in range(3):
            loop.step()
    assert watched.page.view.tape is watched.live.tape(3)
    assert watched.ask(type="live visible", visible=True)["shown"] == 3


def test_a_run_goes_on_being_sent_while_one_of_two_pages_is_seen(watched: Watched) -> None:
    with watched.run() as loop:
        watched.browser.request(type="everything", view="one")
        watched.browser.request(type="live visible", visible=False, view="other")
        watched.browser.messages.clear()
        loop.step()
        assert len(watched.states()) == 1


def test_a_page_that_misses_steps_gets_all_of_them(watched: Watched) -> None:
    with watched.run() as loop:
        loop.step()
        loop.step()
        state = watched.ask(type="live everything")
    assert list(state["base"]["last"]) == [1.0, 2.0]


def test_a_reopened_page_gets_all_steps_and_the_tape(watched: Watched) -> None:
    with watched.run(first=3, every=1000) as loop:
        for _ in range(4):
            loop.step()
    (answer,) = watched.browser.request(type="everything", view="second")
    assert list(answer["live"]["base"]["last"]) == [1.0, 2.0, 3.0, 4.0]
    assert answer["live"]["shown"] == 3  # the first three steps are recorded
    assert watched.page.view.tape is watched.live.tape(3)


def test_more_new_steps_than_are_kept_singly_are_sent_in_bins(slow: Watched, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(live_page, "_MOST_NEW_STEPS", 3)
    with slow.run() as loop:
        for _ in range(6):
            loop.step()
    assert "base" in slow.states()[-1]
    assert steps_sent(slow.states()) == [1, 2, 3, 4, 5, 6]


def test_the_timeline_follows_the_newest_recorded_step_over_the_one_before(watched: Watched) -> None:
    with watched.run(first=3) as loop:
        for _ in range(3):
            loop.step()
    assert (watched.page.view.tape, watched.page.view.before) == (watched.live.tape(3), watched.live.tape(2))


def test_of_recorded_steps_that_come_fast_the_newest_is_shown(
    watched: Watched, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(live_page, "_SECONDS_OF_TAPES", 3600.0)
    with watched.run(first=4) as loop:
        for _ in range(4):
            loop.step()
        assert watched.page.view.tape is watched.live.tape(1)
    assert watched.page.view.tape is watched.live.tape(4)


def test_pictures_come_more_rarely_while_watching_costs_much(watched: Watched, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(live_message, "share_of_pictures", lambda overhead: 1e-9 if overhead > 0 else 1e9)
    with watched.run(first=4) as loop:
        for _ in range(4):
            loop.step()
        # The first one is shown in any case, and the newest at the end.
        assert watched.page.view.tape is watched.live.tape(1)
    assert watched.page.view.tape is watched.live.tape(4)


def test_details_are_sent_when_the_page_has_drawn_the_tape(watched: Watched) -> None:
    with watched.run(first=1) as loop:
        loop.step()
        kinds = [message["type"] for message in watched.browser.messages]
        assert "tape" in kinds
        assert "details" not in kinds
        messages = watched.browser.request(type="drawn", view="page", number=1, tape=1)
        assert [message["type"] for message in messages] == ["details"]


def test_a_click_shows_the_nearest_recorded_step_and_ends_following(watched: Watched) -> None:
    with watched.run(first=3) as loop:
        for _ in range(5):
            loop.step()
        state = watched.ask(type="live step", step=1.4)
        assert (state["shown"], state["follows"]) == (1, False)
        watched.live.record_next()
        loop.step()  # runs already and is not recorded: asked for at its begin
        loop.step()
        assert watched.page.view.tape is watched.live.tape(1)
        state = watched.ask(type="live newest")
    assert (state["follows"], state["shown"]) == (True, watched.live.recorded[-1])


def test_two_steps_are_compared_the_later_one_over_the_outline_of_the_earlier(watched: Watched) -> None:
    with watched.run(first=3) as loop:
        for _ in range(3):
            loop.step()
        state = watched.ask(type="live compare", first=0.7, last=3.2)
    assert (state["shown"], state["before"]) == (3, 1)
    assert watched.page.view.before is watched.live.tape(1)


def test_a_pinned_step_is_the_outline_of_later_ones(watched: Watched) -> None:
    with watched.run(first=4) as loop:
        loop.step()
        assert watched.ask(type="live pin")["pinned"] == 1
        for _ in range(3):
            loop.step()
        assert watched.page.view.before is watched.live.tape(1)
        assert watched.ask(type="live pin")["pinned"] is None
    assert watched.page.view.before is watched.live.tape(3)


def test_of_consecutive_rises_for_the_same_reason_the_first_is_marked() -> None:
    reasons = ["first step", "", "leak: 1 MiB", "leak: 2 MiB", "larger batch: 8", "leak: 3 MiB"]
    rows = [StepRow(number, 0.1, rose_because=reason) for number, reason in enumerate(reasons, 1)]
    assert [mark["step"] for mark in live_message.marks(rows)] == [1, 3, 5, 6]
    assert [mark["step"] for mark in live_message.marks(rows[3:], rows[2])] == [5, 6]


def test_pause_and_resume_by_the_page(watched: Watched) -> None:
    with watched.run() as loop:
        loop.step()
        assert watched.ask(type="live pause")["wants_pause"]
        loop.step()
        assert watched.live.state is State.PAUSED
        assert watched.states()[-1]["title"] == "Paused"
        watched.ask(type="live resume")
        loop.step()
        loop.step()
        assert watched.live.state is State.WATCHING
    assert watched.live.steps()["step"].tolist() == [1, 2, 4]


def test_an_exception_leaves_the_tape_and_the_error(watched: Watched) -> None:
    with pytest.raises(ZeroDivisionError), watched.run() as loop:
        loop.step()
        loop.model(loop.loss().new_ones(8, 64))
        1 / 0  # noqa: B018
    state = watched.states()[-1]
    assert (state["state"], state["level"]) == (State.FAILED, "error")
    assert state["error"].startswith("ZeroDivisionError")
    assert {mark["kind"] for mark in state["marks"]} >= {"failed"}
    assert watched.page.view.tape is watched.live.tape()


def test_a_leak_is_named_with_its_holder_until_it_is_ignored(watched: Watched, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(live_leak, "_SECONDS_FOR_HOLDERS", 60.0)  # the search walks over all objects of the tests
    kept = []
    with watched.run() as loop:
        for _ in range(40):
            kept.append(loop.model(loop.loss().new_ones(4096, 64)))
            loop.step()
    state = watched.states()[-1]
    assert "grows by" in state["leak"]["text"]
    assert any("kept" in holder for holder in state["leak"]["held_by"]), state["leak"]
    assert watched.ask(type="live ignore")["leak"] is None


def test_the_line_of_a_leak_stays_when_a_later_cell_deletes_what_leaked(
    watched: Watched, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(live_leak, "_SECONDS", 0.0)
    monkeypatch.setattr(live_leak, "_SHARE", 1e9)
    kept = []
    with watched.run(first=100) as loop:
        for _ in range(20):
            kept.append(loop.model(loop.loss().new_ones(4096, 64)))
            loop.step()
    at_end = watched.states()[-1]["leak"]
    assert at_end["line"]
    kept.clear()
    assert watched.ask(type="live visible", visible=True)["leak"] == at_end


def test_a_line_gets_no_tape_until_it_is_opened(monkeypatch: pytest.MonkeyPatch) -> None:
    watched = Watched(monkeypatch, 0.0, form="line")
    with watched.run(first=3) as loop:
        for batch in (8, 8, 800):
            loop.step(batch)
        assert watched.states()[-1]["form"] == "line"
        assert not {"tape", "tabs"} & {message["type"] for message in watched.browser.messages}
        opened = watched.ask(type="live form", form="page")
        assert (opened["form"], opened["shown"]) == ("page", 3)
        assert watched.page.view.tape is watched.live.tape(3)
        assert {"tape", "tabs"} <= {message["type"] for message in watched.browser.messages}


def test_a_line_can_be_opened_after_its_run(monkeypatch: pytest.MonkeyPatch) -> None:
    watched = Watched(monkeypatch, 0.0, form="line")
    with watched.run(first=3) as loop:
        loop.step()
    assert watched.page.view.tape is watched.live.tape()
    assert watched.ask(type="live form", form="page")["shown"] == 1


def test_tabs_show_layers_and_rises_and_their_clicks_show_a_step(watched: Watched) -> None:
    with watched.run(first=3) as loop:
        for batch in (8, 8, 800):
            loop.step(batch)
    tabs = {
        tab["name"]: tab for message in watched.browser.messages if message["type"] == "tabs" for tab in message["tabs"]
    }
    assert tabs.keys() == {LAYERS, RISES}
    assert [row["cells"][0] for row in tabs[RISES]["rows"]] == ["1", "3"]
    assert watched.ask(type="tab click", tab=RISES, row=0)["shown"] == 1
    assert watched.ask(type="tab click", tab=LAYERS, row=2)["shown"] == 2


@pytest.mark.parametrize("recorded", [1, 3], ids=["light", "recorded"])
def test_training_does_not_wait_for_a_request_that_is_being_answered(watched: Watched, recorded: int) -> None:
    with watched.run(first=recorded, every=1000) as loop:
        loop.step()
        watched.browser.messages.clear()
        held, release = threading.Event(), threading.Event()

        def answer() -> None:
            with watched.page.view.lock:
                held.set()
                release.wait(60)

        thread = threading.Thread(target=answer)
        thread.start()
        held.wait(60)
        loop.step()
        assert watched.states() == []
        assert watched.page.view.tape is watched.live.tape(1)
        release.set()
        thread.join()
        loop.step()
    assert steps_sent(watched.states())[:2] == [2, 3]
    assert watched.page.view.tape is watched.live.tape(recorded)


def test_the_second_thread_ends_with_the_run(watched: Watched) -> None:
    before = set(threading.enumerate())  # those of earlier tests may end meanwhile
    with watched.run() as loop:
        loop.step()
        (second,) = set(threading.enumerate()) - before
    second.join(60)
    assert not second.is_alive()


@pytest.mark.parametrize(("reads", "requests"), [(False, 0), (False, 1), (True, 0)])
def test_a_page_whose_requests_are_not_read_gets_everything_unasked(
    watched: Watched, monkeypatch: pytest.MonkeyPatch, reads: bool, requests: int
) -> None:
    monkeypatch.setattr(live_page, "_SECONDS_WITHOUT_REQUEST", 0.0)
    monkeypatch.setattr(live_page, "reads_while_busy", lambda: reads)
    with watched.run() as loop:
        for _ in range(requests):
            watched.browser.request(type="everything", view="page")
        loop.step()
    kinds = [message["type"] for message in watched.browser.messages]
    assert ("plotly" in kinds) == (not reads and not requests)


def test_the_sentence_below_the_page_has_the_newest_and_the_highest_peak(watched: Watched) -> None:
    with watched.run(first=0, every=1000) as loop:
        loop.step(32)
        loop.step()
    _, peak, *more = watched.page._sentence().split(". ")
    highest, newest = (mx.size_text(size) for size in watched.live.steps()["peak_allocated"])
    assert peak.startswith(f"Peak {newest} of 14.4 GiB, ")
    assert peak.endswith(f" %; highest {highest} in step 1")
    assert more == []


def test_a_rise_names_the_line_of_its_cell(shell: Shell) -> None:
    shell.run("%memgpu T4").raise_error()
    shell.run("import memexplore as mx\nmodel = torch.nn.Linear(64, 64).cuda()")
    shell.run(
        "opt = torch.optim.AdamW(model.parameters())\n"
        "with mx.watch(model, opt, first=2) as live:\n"
        "    for _ in range(2):\n"
        "        model(torch.ones(1024, 64, device='cuda')).relu().sum().backward()\n"
        "        opt.step()\n"
        "        opt.zero_grad()"
    ).raise_error()
    reason = shell["live"].steps()["rose_because"].iloc[1]
    assert reason.endswith(" (Cell In[4], line 4) in step 2")
