"""A search that does one run at each call: for a step that cannot be sent to another process.

In: a step and a GPU. Out: the reports of `beside`. The search runs in a thread of its own, and only while the caller
waits in `SearchInTurns.advance`: the virtual GPU and the changes of a knob to the model are process-wide.
"""

from __future__ import annotations

import threading
from typing import Any

from memexplore.search import workers
from memexplore.search.advice import Advice
from memexplore.search.advise import advise
from memexplore.search.beside import Ended, Found, Report
from memexplore.search.progress import Progress
from memexplore.steps.step import Step
from memexplore.tape import Os


class _Stopped(BaseException):
    """Ends the search. A BaseException, so that `except Exception` cannot catch it."""


class SearchInTurns:
    """A search that goes on while `advance` is called; `report` is called in the thread of that call."""

    def __init__(self, step: Step, gpu: str, report: Report, *, release: str | None, os: str = Os.LINUX) -> None:
        self._report = report
        self._arguments: dict[str, Any] = {"step": step, "gpu": gpu, "release": release, "os": os}
        self._may_run, self._has_run = threading.Semaphore(0), threading.Semaphore(0)
        self._events: list[Found | Ended] = []
        self._latest: Advice | None = None
        self._is_stopped = False
        self._thread = threading.Thread(target=self._search, name="memexplore-search", daemon=True)
        self._thread.start()

    def advance(self) -> bool:
        """Do the next run and report it; return whether the search goes on."""
        if self._is_stopped:
            return False
        self._may_run.release()
        self._has_run.acquire()
        events, self._events = self._events, []
        for event in events:
            self._report(event)
        return not self._is_stopped

    def stop(self) -> None:
        """End the search without a further report."""
        self._is_stopped = True
        # The thread waits for its turn, in which it ends; a run in progress ends first.
        self._may_run.release()

    def _search(self) -> None:
        self._may_run.acquire()
        try:
            advice = advise(**self._arguments, progress=self._pause, found=self._keep)
            ended = Ended(advice, None)
        except _Stopped:
            self._has_run.release()
            return
        except Exception as error:
            ended = Ended(None, workers.without_frames(error))
        self._events.append(ended)
        self._is_stopped = True
        self._has_run.release()

    def _keep(self, advice: Advice) -> None:
        self._latest = advice

    def _pause(self, progress: Progress) -> None:
        self._events.append(Found(progress, self._latest))
        self._has_run.release()
        self._may_run.acquire()
        if self._is_stopped:
            raise _Stopped
