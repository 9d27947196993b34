"""Notes of a watched run that reach its page although no step ends."""

from __future__ import annotations

import time

import pytest
import torch

from memexplore.jupyter.live_page import LivePage
from tests.jupyter.watched import Watched
from tests.live.training import Loop


class Looking(Watched):
    """A run whose page looks for notes all the time, and counts its looks."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        super().__init__(monkeypatch, 0.01, seconds_of_notes=0.01)
        self.looks = 0
        flush = LivePage.flush

        def counted(page: LivePage) -> None:
            flush(page)
            self.looks += 1

        monkeypatch.setattr(LivePage, "flush", counted)

    def look_three_times(self) -> None:
        """Wait for three looks that are over, of which two have begun after this call."""
        wanted, end = self.looks + 3, time.monotonic() + 60
        while self.looks < wanted:
            assert time.monotonic() < end
            time.sleep(0.01)


@pytest.fixture
def watched(monkeypatch: pytest.MonkeyPatch) -> Looking:
    return Looking(monkeypatch)


def call_without_a_step(loop: Loop, watched: Looking) -> None:
    """Call the model until a note says why no step ends, and wait for the page to look for notes."""
    for _ in range(20):
        loop.model(torch.ones(2, 64, device="cuda")).sum().backward()
    assert "no optimizer has stepped" in watched.live.notes[0]
    watched.look_three_times()


def test_a_note_is_sent_although_no_step_ends(watched: Looking) -> None:
    with watched.run() as loop:
        call_without_a_step(loop, watched)
        assert watched.states()[-1]["notes"] == list(watched.live.notes)
        watched.browser.messages.clear()
        watched.look_three_times()
        # Once: later looks found the same note.
        assert watched.states() == []


def test_a_note_is_not_sent_to_a_hidden_page(watched: Looking) -> None:
    with watched.run() as loop:
        watched.ask(type="live visible", visible=False)
        watched.look_three_times()  # one that has begun before may send a message yet
        watched.browser.messages.clear()
        call_without_a_step(loop, watched)
        assert watched.states() == []
