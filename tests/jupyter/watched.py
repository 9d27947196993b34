"""A watched run with its page, for tests: what the page would get, without a browser."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Literal

import pytest

import memexplore as mx
from memexplore.jupyter import live_message, live_page
from memexplore.jupyter.live_page import LivePage
from memexplore.live import watch as live_watch
from memexplore.live.watch import Session
from tests.jupyter.stand_in import Browser
from tests.live.training import Loop


class Watched:
    """A watched run on a virtual T4 with its page and a stand-in for the browser."""

    def __init__(
        self,
        monkeypatch: pytest.MonkeyPatch,
        seconds: float,
        form: Literal["page", "line"] = "page",
        seconds_of_notes: float = 3600.0,
    ) -> None:
        self.monkeypatch, self.form = monkeypatch, form
        monkeypatch.setattr(live_page, "SECONDS", seconds)
        # Else the second thread sends a message of its own where a step takes longer than a quarter of a second.
        monkeypatch.setattr(live_page, "_SECONDS_OF_NOTES", seconds_of_notes)
        monkeypatch.setattr(live_page, "_SECONDS_OF_TAPES", 0.0)
        # Every recorded step is shown at once.
        monkeypatch.setattr(live_message, "share_of_pictures", lambda overhead: 1e9)

    def show(self, session: Session) -> None:
        self.session = session
        self.page = LivePage(session, self.form)
        self.browser = Browser(self.page.view, self.monkeypatch)

    @contextmanager
    def run(self, **options: Any) -> Iterator[Loop]:
        with mx.virtual("T4"):
            loop = Loop("cuda")
            with live_watch.watch(loop.model, loop.optimizer, on_begin=[self.show], **options):
                yield loop

    def states(self) -> list[dict[str, Any]]:
        """The contents of the messages "live" so far."""
        return [message["live"] for message in self.browser.messages if message["type"] == "live"]

    def ask(self, **request: Any) -> dict[str, Any]:
        """Send a request and return the state that follows, before the second thread sends another one."""
        with self.page.view.lock:
            self.browser.request(view="page", **request)
            return self.states()[-1]

    @property
    def live(self) -> Any:
        return self.session.live
