"""A limit of a run: it ends as if its program had come to its end, after so many optimizer steps or seconds."""

from __future__ import annotations

import contextlib
import math
import signal
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

from torch.optim.optimizer import register_optimizer_step_post_hook

from memexplore.recorder.recording import Recording
from memexplore.run.programs.cost import ProgramEnded, interruptible
from memexplore.tape import Ending

_MORE_STEPS = 4
"""Steps of all optimizers that a run goes on after those of the run that failed."""
SECONDS = 60.0
"""Most seconds of a run that nobody watches."""


class Limit:
    """Ends a run where `is_enough`, a function of the steps of all optimizers and the seconds so far, returns True.

    A run that takes more than `most_seconds` is ended too, also in a loop without an op on the GPU, and is an error.
    """

    def __init__(self, is_enough: Callable[[int, float], bool], most_seconds: float = math.inf) -> None:
        self.steps = 0
        """Steps of all optimizers so far."""
        self.has_ended_run = False
        self._is_enough, self._most_seconds = is_enough, most_seconds
        self._start = math.nan
        self._is_late = False

    @contextlib.contextmanager
    def limiting(self) -> Iterator[None]:
        """Limit the run in the block. Raises TimeoutError where it took too long.

        >>> import torch
        >>> from memexplore.run.machine import machine_of
        >>> from memexplore.run.programs.cell import Cell
        >>> loop = '''weight = torch.nn.Parameter(torch.ones(1, device="cuda"))
        ... while True:
        ...     weight.sum().backward()
        ...     torch.optim.SGD([weight]).step()'''
        >>> from memexplore.run.run import run
        >>> limit = Limit(lambda steps, seconds: steps == 3)
        >>> with limit.limiting():
        ...     result = run(Cell(loop, {"torch": torch}), machine=machine_of("T4"))
        >>> limit.steps, limit.has_ended_run
        (3, True)
        """
        hook = register_optimizer_step_post_hook(self._count)
        self._start = time.monotonic()
        try:
            with contextlib.suppress(ProgramEnded), interruptible(self._check), self._alarm():
                yield
        finally:
            hook.remove()
        if self._is_late:
            raise TimeoutError(f"it has run for {self._most_seconds:.0f} s without an end")

    def _count(self, *_: Any) -> None:
        self.steps += 1

    def _check(self) -> None:
        """Raise ProgramEnded where the run has reached the limit."""
        seconds = time.monotonic() - self._start
        self._is_late = self._is_late or seconds > self._most_seconds
        if self._is_late or self._is_enough(self.steps, seconds):
            self.has_ended_run = True
            raise ProgramEnded

    @contextlib.contextmanager
    def _alarm(self) -> Iterator[None]:
        """Check every second once the run is late; only the main thread of a Unix system has an alarm."""
        is_main = threading.current_thread() is threading.main_thread()
        if math.isinf(self._most_seconds) or not hasattr(signal, "setitimer") or not is_main:
            yield
            return
        before = signal.signal(signal.SIGALRM, lambda *_: self._check())
        # Again every second: an exception in a finalizer is lost.
        signal.setitimer(signal.ITIMER_REAL, self._most_seconds + 1, 1)
        try:
            try:
                yield
            finally:
                signal.setitimer(signal.ITIMER_REAL, 0)
        finally:
            # The alarm may come before that call, and interrupt it.
            signal.setitimer(signal.ITIMER_REAL, 0)
            signal.signal(signal.SIGALRM, before)


class FailureLimit:
    """Limits the runs of one program that nobody watches: some steps after its first run that ran out of memory.

    Before the first failure a run takes as long as the program does, or `most_steps` of all optimizers, but never more
    than `most_seconds`.
    """

    def __init__(self, most_seconds: float = SECONDS, most_steps: int | None = None) -> None:
        self._most_seconds, self._most_steps = most_seconds, most_steps
        self._failed_after: int | None = None
        """Steps of the first run that ran out of memory, None before it."""

    @contextlib.contextmanager
    def limited(self, recording: Recording) -> Iterator[None]:
        """Limit the run in the block. Raises TimeoutError where it takes too long."""
        most = self._most_steps if self._failed_after is None else self._failed_after + _MORE_STEPS
        limit = Limit(lambda steps, _: most is not None and steps >= most, self._most_seconds)
        with limit.limiting():
            yield
        if self._failed_after is None and recording.ending is Ending.OUT_OF_MEMORY:
            self._failed_after = limit.steps
