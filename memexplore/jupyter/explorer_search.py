"""The search of an explorer: started, stopped, its progress and the advice so far; cells can run meanwhile."""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Callable
from typing import Any

from memexplore.jupyter.explorer_message import SearchState, reason_text
from memexplore.jupyter.main_thread import MainThread
from memexplore.run.knobs.knobs import Knobs
from memexplore.run.machine import Machine
from memexplore.run.programs.packing import UnsendableStepError
from memexplore.run.programs.step import Step
from memexplore.run.run import Want
from memexplore.run.search import search_process
from memexplore.run.search.advice import Advice
from memexplore.run.search.advise import StepSearch
from memexplore.run.search.runners import OneByOne
from memexplore.run.search.search_process import Ended, Found, Report, SearchProcess, events_of

Stop = Callable[[], None]
StartSearch = Callable[[Knobs, Report, MainThread], Stop]
"""Starts a search for settings that fit the GPU of some knobs with their batch and input size.

Reports in any thread; returns how to end the search."""

_SECONDS_BETWEEN_RUNS = 0.05
_SECONDS_BEFORE_PREPARING = 3
"""Seconds after the start of an explorer, which has the processor first, until the process of a search is started."""


class Search:
    """At most one search at a time.

    `on_advice` is called when the advice is another one, and `on_progress` after each change, both in any thread.
    """

    def __init__(
        self,
        start: StartSearch | None,
        unavailable: str,
        thread: MainThread,
        lock: threading.RLock | Any,
        on_advice: Callable[[], object],
        on_progress: Callable[[], object],
    ) -> None:
        self._begin, self._thread, self._lock = start, thread, lock
        self._on_advice, self._on_progress = on_advice, on_progress
        self._stop: Stop = lambda: None
        self._number = 0
        self.advice: Advice | None = None
        self.base = Knobs()
        """GPU, batch and input size with which the latest search began; the settings of the advice do not name them."""
        self.state = SearchState() if start is not None else SearchState("unavailable", text=unavailable)
        if start is not None:
            thread.run_after(_SECONDS_BEFORE_PREPARING, search_process.prepare)

    @property
    def is_running(self) -> bool:
        """Whether a search is under way."""
        return self.state.state == "running"

    def start(self, knobs: Knobs) -> None:
        """Start a search, on the main thread of the kernel. No effect while one runs or where none is possible."""
        with self._lock:
            if self._begin is None or self.is_running:
                return
            self._number += 1
            number, self._stop = self._number, lambda: None
            self.base = Knobs(gpu=knobs.gpu, batch=knobs.batch, input_size=knobs.input_size)
            self.advice, self.state = None, SearchState("running", text="Starting")
        self._on_progress()

        def report(event: Found | Ended) -> None:
            if number == self._number:
                self._receive(event)

        try:
            stop = self._begin(self.base, report, self._thread)
        except Exception as error:
            report(Ended(None, error))
            return
        except BaseException:  # an interrupt of a search that runs before `start` returns
            self.stop()
            raise
        with self._lock:
            if number == self._number:
                self._stop = stop
                return
        stop()  # a person pressed Stop while the search started

    def stop(self) -> None:
        """End the search; what it has found stays."""
        with self._lock:
            if not self.is_running:
                return
            self._number += 1
            self._stop()
            self.state = after_stop(self.state)
            if self.advice is not None:
                self.advice = dataclasses.replace(self.advice, cancelled=True)
        self._on_advice()
        self._on_progress()

    def _receive(self, event: Found | Ended) -> None:
        with self._lock:
            before = self.advice
            self.advice, self.state = event.advice or self.advice, after(self.state, event)
            is_new = _shown(before) != _shown(self.advice) or isinstance(event, Ended)
        if is_new:
            self._on_advice()
        self._on_progress()


def after(state: SearchState, event: Found | Ended) -> SearchState:
    """Return the state after a report of the search.

    >>> from memexplore.run.search.progress import Progress
    >>> after(SearchState("running"), Found(Progress(18, 0, 40, 9.0, 11.2), None)).text
    '18 of about 40 runs, about 11 s left'
    """
    if isinstance(event, Found):
        done, _, planned, _, left = event.progress
        text = f"{done} of about {planned} runs" + (f", about {left:.0f} s left" if left else "")
        return SearchState("running", done, planned, left, text)
    if event.error is not None:
        return state._replace(state="stopped", seconds_left=None, text=reason_text(event.error))
    return SearchState("done", state.done, state.done, None, f"Done after {state.done} runs")


def after_stop(state: SearchState) -> SearchState:
    """Return the state after a person has stopped the search.

    >>> after_stop(SearchState("running", 18, 40, 11.2)).text
    'Stopped after 18 runs'
    """
    return SearchState("stopped", state.done, state.planned, None, f"Stopped after {state.done} runs")


def _shown(advice: Advice | None) -> list[tuple[Knobs, str]] | int | None:
    """Return what the tab of an advice shows: its settings; without one, how many were tried after the first."""
    if advice is None or not advice.options:
        return len(advice.tried) if advice is not None and len(advice.tried) > 1 else None
    return [(option.knobs, option.largest_text) for option in advice.options]


def search_step(step: Step, machine: Machine, report: Report, thread: MainThread, base: Knobs | None = None) -> Stop:
    """Start a search beside the kernel: in a process, or if the step cannot be sent to one, in the kernel's idle time.

    Without a kernel, search before returning.
    """
    if thread.is_kernel:
        try:
            return SearchProcess(step, machine, report, base=base).stop
        except UnsendableStepError:
            pass
    search = StepSearch(step, machine, base=base)
    events = events_of(search, OneByOne(step, search.machine, Want.NUMBERS))
    if not thread.is_kernel:
        for event in events:
            report(event)
        return lambda: None
    is_stopped = threading.Event()

    def advance() -> None:
        event = None if is_stopped.is_set() else next(events, None)
        if event is not None and not is_stopped.is_set():
            report(event)
            thread.run_after(_SECONDS_BETWEEN_RUNS, advance)

    thread.run(advance)
    return is_stopped.set
