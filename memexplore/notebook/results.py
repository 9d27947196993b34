"""Results of the settings of an explorer, and runs ahead of a request while the kernel is idle."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable
from typing import NamedTuple

from memexplore.knobs.knobs import Knobs
from memexplore.notebook.main_thread import MainThread
from memexplore.steps.cost import interruptible
from memexplore.steps.outcome import Outcome
from memexplore.steps.trial import Trial


class Result(NamedTuple):
    """Trial and numbers of one setting."""

    trial: Trial
    outcome: Outcome


Run = Callable[[Knobs], tuple[Trial, Outcome]]


class _Cancelled(BaseException):
    """Cancels a run. A BaseException, so that `except Exception` cannot catch it."""


def run_ahead(settings: Iterable[Knobs], results: dict[Knobs, Result], run: Run, thread: MainThread) -> bool:
    """Run the first setting that has no result yet, until an event arrives for the main thread.

    Return whether it ran to its end, so that the next one may follow.
    """
    knobs = next((knobs for knobs in settings if knobs not in results), None)
    if knobs is None or thread.has_pending_events():
        return False

    def cancel_if_events_wait() -> None:
        if thread.has_pending_events():
            raise _Cancelled

    # A run that fails here fails again, with a message, when it is requested.
    with contextlib.suppress(_Cancelled, Exception), interruptible(cancel_if_events_wait):
        results[knobs] = Result(*run(knobs))
    return knobs in results
