"""Report a rank's requests up to the end of its first optimizer step and to its end, in the process that runs it.

`equal_ranks` asks for the report by an environment variable, and compares ranks by it. The report is an object of
`--json`.
"""

from __future__ import annotations

import contextlib
import enum
import os
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from memexplore.recorder.recorder import Recorder

VARIABLE = "MEMEXPLORE_REQUESTS"
"""Environment variable with an `Until`; unset in a run whose requests are not compared."""


class Until(enum.Enum):
    """Where a run whose requests are compared ends."""

    FIRST_STEP = "first step"
    """At the end of its first optimizer step, or at its own end if it has none."""
    END = "end"


class FirstStepEnded(BaseException):
    """Ends a program after its first optimizer step. A BaseException, so that `except Exception` cannot catch it."""


class Requests:
    """The requests of one run; empty if they are not compared."""

    def __init__(self, until: Until | None) -> None:
        self._until = until
        self._texts: dict[str, Any] = {"first_step": None, "end": None}
        self.is_stopped = False
        """Whether the program was ended after its first optimizer step."""

    def as_dict(self) -> dict[str, Any]:
        """Return the entry for the object of `--json`: of each part the number of allocations and a digest."""
        return {} if self._until is None else {"requests": dict(self._texts)}

    @contextlib.contextmanager
    def follow(self, recorder: Recorder | None) -> Iterator[None]:
        """Note the requests of the program that the block runs, and end it where it is to end."""
        if self._until is None or recorder is None:
            yield
            return
        from torch.optim.optimizer import register_optimizer_step_post_hook

        from memexplore.recorder.request_sequence import request_sequence

        def stepped(*_: Any) -> None:
            if self._texts["first_step"] is None:
                self._texts["first_step"] = request_sequence(recorder.events, recorder.streams)
                if self._until is Until.FIRST_STEP:
                    self.is_stopped = True
                    raise FirstStepEnded

        hook = register_optimizer_step_post_hook(stepped)
        try:
            yield
        except FirstStepEnded:
            pass
        finally:
            hook.remove()
            if not self.is_stopped:
                self._texts["end"] = request_sequence(recorder.events, recorder.streams)


def of_environment() -> Requests:
    """Return the requests to note in this process, and hide the variable from processes that the program starts."""
    text = os.environ.pop(VARIABLE, None)
    return Requests(None if text is None else Until(text))
