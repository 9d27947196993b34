"""A search that does one run at each call: for a step that cannot be sent to another process.

In: a step and a GPU. Out: the reports of `beside`. The runs take place in the thread of the caller: the virtual GPU and
the changes of a knob to the model are process-wide, and torch 2.11 crashes where two threads use fake tensors. Only the
choice of the next setting takes place in a thread of the search, while the caller waits.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

from memexplore.knobs.knobs import Knobs
from memexplore.search import workers
from memexplore.search.advice import Advice
from memexplore.search.advise import advise
from memexplore.search.beside import Ended, Found, Report
from memexplore.search.progress import Progress
from memexplore.steps.outcome import Outcome, run_unlimited
from memexplore.steps.step import Step
from memexplore.steps.trial import Trial
from memexplore.tape import Os


class _Stopped(BaseException):
    """Ends the search. A BaseException, so that `except Exception` cannot catch it."""


class SearchInTurns:
    """A search that goes on while `advance` is called; runs and calls of `report` take place in that call."""

    def __init__(
        self,
        step: Step,
        gpu: str,
        report: Report,
        *,
        release: str | None,
        os: str = Os.LINUX,
        base: Knobs | None = None,
    ) -> None:
        self._report = report
        self._arguments: dict[str, Any] = {"step": step, "gpu": gpu, "release": release, "os": os, "base": base}
        self._may_choose, self._has_chosen = threading.Semaphore(0), threading.Semaphore(0)
        self._chosen: Callable[[], tuple[Trial, Outcome]] | None = None
        self._result: tuple[Trial, Outcome] | Exception | None = None
        self._events: list[Found | Ended] = []
        self._latest: Advice | None = None
        self._is_stopped = False
        self._thread = threading.Thread(target=self._search, name="memexplore-search", daemon=True)
        self._thread.start()

    def advance(self) -> bool:
        """Report the run before, and do the next one; return whether the search goes on."""
        if self._is_stopped:
            return False
        self._may_choose.release()
        self._has_chosen.acquire()
        events, self._events = self._events, []
        for event in events:
            self._report(event)
        if self._chosen is not None and not self._is_stopped:
            try:
                self._result = self._chosen()
            except Exception as error:
                self._result = error
        return not self._is_stopped

    def stop(self) -> None:
        """End the search without a further report."""
        self._is_stopped = True
        self._may_choose.release()

    # -- in the thread of the search

    def _search(self) -> None:
        self._may_choose.acquire()
        if self._is_stopped:
            return
        try:
            advice = advise(**self._arguments, progress=self._on_progress, found=self._on_advice, run_setting=self._run)
            ended = Ended(advice, None)
        except _Stopped:
            self._has_chosen.release()
            return
        except Exception as error:
            ended = Ended(None, workers.without_frames(error))
        self._events.append(ended)
        self._chosen, self._is_stopped = None, True
        self._has_chosen.release()

    def _run(self, step: Step, knobs: Any, **arguments: Any) -> tuple[Trial, Outcome]:
        """Let the caller run a setting, and wait for its result."""
        self._chosen = lambda: run_unlimited(step, knobs, **arguments)
        self._has_chosen.release()
        self._may_choose.acquire()
        if self._is_stopped:
            raise _Stopped
        result = self._result
        if isinstance(result, Exception):
            raise result
        assert result is not None
        return result

    def _on_advice(self, advice: Advice) -> None:
        self._latest = advice

    def _on_progress(self, progress: Progress) -> None:
        self._events.append(Found(progress, self._latest))
