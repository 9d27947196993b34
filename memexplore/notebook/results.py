"""Results of the settings of an explorer, and runs ahead of a request while the kernel is idle."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import NamedTuple

from memexplore.knobs.knobs import Knobs
from memexplore.notebook.knob import Knob
from memexplore.notebook.main_thread import MainThread
from memexplore.steps.cost import interruptible
from memexplore.steps.outcome import Outcome, is_unfinished
from memexplore.steps.trial import Trial


class Result(NamedTuple):
    """Trial and numbers of one setting."""

    trial: Trial
    outcome: Outcome

    @property
    def is_unfinished(self) -> bool:
        """Whether what Python frees after the failed request is not on the tape."""
        return is_unfinished(self.trial)

    def finished(self, whole_run: tuple[Trial, Outcome]) -> Result:
        """Return the result of the run to its end, with the picture of this one."""
        trial, outcome = whole_run
        return Result(trial._replace(tape=trial.tape.replace(whole=self.trial.tape.whole)), outcome)


Run = Callable[[Knobs], tuple[Trial, Outcome]]


_MAX_OTHERS = 64
"""Results kept of settings that are not in the history, the latest: positions of drags, and runs ahead of a request."""


def forget_old(results: dict[Knobs, Result], kept: Collection[Knobs]) -> None:
    """Remove the oldest results beyond a number, except those of the settings in `kept`."""
    others = [knobs for knobs in results if knobs not in kept]
    for knobs in others[: max(len(others) - _MAX_OTHERS, 0)]:
        del results[knobs]


class RunCancelled(BaseException):
    """Ends a run for something more urgent. A BaseException, so that `except Exception` cannot catch it."""


def run_ahead(settings: Iterable[Knobs], results: dict[Knobs, Result], run: Run, thread: MainThread) -> bool:
    """Run the first setting that has no result yet, until an event arrives for the main thread.

    Return whether it ran to its end, so that the next one may follow.
    """
    knobs = next((knobs for knobs in settings if knobs not in results), None)
    if knobs is None or thread.has_pending_events():
        return False

    def cancel_if_events_wait() -> None:
        if thread.has_pending_events():
            raise RunCancelled

    # A run that fails here fails again, with a message, when it is requested.
    with contextlib.suppress(RunCancelled, Exception), interruptible(cancel_if_events_wait):
        results[knobs] = Result(*run(knobs))
    return knobs in results


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

    def cancel_if_urgent() -> None:
        if is_urgent():
            raise RunCancelled

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
