"""Run settings only while nothing is more urgent, such as an event for the kernel's main thread."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Sequence

from memexplore.jupyter.main_thread import MainThread
from memexplore.run.knobs.control import Control
from memexplore.run.knobs.knobs import KNOBS, Knobs
from memexplore.run.programs.cost import interruptible
from memexplore.run.run import Run


class RunCancelled(BaseException):
    """Ends a run for something more urgent. A BaseException, so that `except Exception` cannot catch it."""


def run_ahead(
    settings: Iterable[Knobs], results: dict[Knobs, Run], run: Callable[[Knobs], Run], thread: MainThread
) -> bool:
    """Run the first setting that has no result yet, until an event arrives for the main thread.

    Return whether it ran to its end, so that the next one may follow.
    """
    knobs = next((knobs for knobs in settings if knobs not in results), None)
    if knobs is None or thread.has_pending_events():
        return False
    # A run that fails here fails again, with a message, when it is requested.
    with contextlib.suppress(RunCancelled, Exception), interruptible(cancelling(thread.has_pending_events)):
        results[knobs] = run(knobs)
    return knobs in results


def cancelling(is_urgent: Callable[[], bool]) -> Callable[[], None]:
    """Return a function for `interruptible` that raises RunCancelled when something is urgent."""

    def check() -> None:
        if is_urgent():
            raise RunCancelled

    return check


def failing_knob(
    knobs: Knobs,
    drawn: Knobs,
    table: Sequence[Control],
    turned: Control | None,
    run: Callable[[Knobs], object],
    is_urgent: Callable[[], bool],
) -> Control | None:
    """Return the knob whose new value makes a setting fail: with its value in `drawn` the setting runs.

    The knob that was turned is tried first. None if no single knob makes the setting fail. Raises RunCancelled when
    something is urgent during such a run.
    """
    fields = dict.fromkeys([*([turned.field] if turned is not None else []), *KNOBS])
    differing = [field for field in fields if getattr(knobs, field) != getattr(drawn, field)]

    cancel_if_urgent = cancelling(is_urgent)
    for field in differing:
        own = turned if turned is not None and turned.field == field else None
        control = own or next((other for other in table if other.field == field), None)
        if control is None:
            continue
        if len(differing) == 1:
            return control
        cancel_if_urgent()
        with contextlib.suppress(Exception), interruptible(cancel_if_urgent):
            run(knobs.replace(**{field: getattr(drawn, field)}))
            return control
    return None
