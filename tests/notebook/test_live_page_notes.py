"""Notes of a watched run that reach its page although no step ends."""

from __future__ import annotations

import time

import pytest
import torch

from tests.live.training import Loop
from tests.notebook.test_live_page import Watched


def calls_without_a_step(loop: Loop, watched: Watched) -> list[str]:
    """Call the model until a note says why no step ends; return the notes that the page has within a second."""
    for _ in range(20):
        loop.model(torch.ones(2, 64, device="cuda")).sum().backward()
    assert "no optimizer has stepped" in watched.live.notes[0]
    end = time.monotonic() + 1
    while time.monotonic() < end:
        time.sleep(0.02)
        if watched.states() and watched.states()[-1]["notes"]:
            break
    return watched.states()[-1]["notes"] if watched.states() else []


def test_a_note_is_sent_although_no_step_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    watched = Watched(monkeypatch, 0.05)
    with watched.run() as loop:
        assert calls_without_a_step(loop, watched) == list(watched.live.notes)
        watched.browser.messages.clear()
        time.sleep(0.4)
        # Once: two looks found the same note.
        assert watched.states() == []


def test_a_note_is_not_sent_to_a_hidden_page(monkeypatch: pytest.MonkeyPatch) -> None:
    watched = Watched(monkeypatch, 0.05)
    with watched.run() as loop:
        watched.ask(type="live visible", visible=False)
        watched.browser.messages.clear()
        assert calls_without_a_step(loop, watched) == []
