"""Results of the settings of an explorer."""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import NamedTuple

from memexplore.knobs.knobs import Knobs
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
