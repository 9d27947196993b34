"""Runs of settings that end for something more urgent, such as an event for the kernel's main thread."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterable, Sequence

from memexplore.knobs.knobs import Knobs
from memexplore.notebook.knob import Knob
from memexplore.notebook.main_thread import MainThread
from memexplore.notebook.results import Result, Run
from memexplore.steps.cost import interruptible


class RunCancelled(BaseException):
    """Ends a run for something more urgent. A BaseException, so that `except Exception` cannot catch it."""


def run_ahead(settings: Iterable[Knobs], results: dict[Knobs, Result], run: Run, thread: MainThread) -> bool:
    """Run the first setting that has no result yet, until an event arrives for the main thread.

    Return whether it ran to its end, so that the next one may follow.
    """
    knobs = next((knobs for knobs in settings if knobs not in results), None)
    if knobs is None or thread.has_pending_events():
        return False
    # A run that fails here fails again, with a message, when it is requested.
    with contextlib.suppress(RunCancelled, Exception), interruptible(cancelling(thread.has_pending_events)):
        results[knobs] = Result(*run(knobs))
    return knobs in results


def run_unless_events_wait(action: Callable[[], object], thread: MainThread) -> bool:
    """Run steps until an event arrives for the main thread; return whether they ran to their end.

    Where events cannot be seen, nothing cancels the steps.
    """
    if not thread.sees_events:
        action()
        return True
    if thread.has_pending_events():
        return False
    try:
        with interruptible(cancelling(thread.has_pending_events)):
            action()
    except RunCancelled:
        return False
    return True


def cancelling(is_urgent: Callable[[], bool]) -> Callable[[], None]:
    """Return a function for `interruptible` that raises RunCancelled when something is urgent."""

    def check() -> None:
        if is_urgent():
            raise RunCancelled

    return check


def failing_knob(
    knobs: Knobs,
    drawn: Knobs,
    table: Sequence[Knob],
    turned: Knob | None,
    run: Callable[[Knobs], object],
    is_urgent: Callable[[], bool],
) -> Knob | None:
    """Return the knob without whose change from `drawn` a setting can be run, `turned` first; None if none is.

    Raises RunCancelled when something is urgent during such a run.
    """
    fields = dict.fromkeys([turned.field] if turned is not None else [])
    fields |= dict.fromkeys(field.name for field in dataclasses.fields(Knobs))
    differing = [field for field in fields if getattr(knobs, field) != getattr(drawn, field)]

    cancel_if_urgent = cancelling(is_urgent)
    for field in differing:
        own = turned if turned is not None and turned.field == field else None
        knob = own or next((one for one in table if one.field == field), None)
        if knob is None:
            continue
        if len(differing) == 1:
            return knob
        cancel_if_urgent()
        with contextlib.suppress(Exception), interruptible(cancel_if_urgent):
            run(knobs.replace(**{field: getattr(drawn, field)}))
            return knob
    return None
