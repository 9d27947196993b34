"""Read the allocator's own history of a CUDA device: every request since the begin of a recording.

It has the workspaces and temporaries of kernels too, and the state of the allocator before. A history that the user
records goes on with the user's settings; then the events since the begin are cut out of it.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import tempfile
import time
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from memexplore.recorder.op_numbers import number_of
from memexplore.snapshot import read
from memexplore.snapshot.history import tape_of
from memexplore.snapshot.recorded import Recorded
from memexplore.tape import Tape
from memexplore.torch_internals.cuda import DUMP_SNAPSHOT, ON_INIT, RECORD_HISTORY, history_is_on
from memexplore.virtual_gpu.device import active

_LASTING_EVENTS = 100_000
"""Events of a history that goes on: some tens of MB of the host's memory."""
_COLUMNS = ("action", "address", "size", "stream", "time", "stack")


def begin_history(most_events: int) -> None:
    """Let the allocator record a new history, of which it keeps the newest events."""
    # Without stacks of frees: gathering one while an exception unwinds C++ code loses the exception, as where a
    # checkpoint stops its recomputation early ("returned NULL without setting an exception"). Events under another
    # limit would be out of order.
    RECORD_HISTORY.value(max_entries=most_events, context="alloc", stacks="python", clear_history=True)


def end_history() -> None:
    """Let the allocator record no history, and drop its events."""
    RECORD_HISTORY.value(enabled=None)


class History(NamedTuple):
    """The history of a recording."""

    tape: Tape
    op_numbers: NDArray[np.int64]
    """For each row of the tape the number of the running op that its stack has (`op_numbers`), -1 without one."""


class LastingHistory:
    """A history that goes on from cell to cell, for post-mortems of code that is not recorded.

    A recording has a history of its own meanwhile, with more events.
    """

    def __init__(self) -> None:
        self._is_wanted = self._is_awaited = False
        self.is_on = False
        """Whether the history of the allocator is this one."""
        self.since_us = 0
        """When the code began whose history is wanted, in microseconds since 1970."""

    def begin(self) -> None:
        """Begin the history where the GPU is in use, else when it is; a history of the user stays as it is.

        A GPU is not initialised by this.
        """
        self._is_wanted, self.since_us = True, time.time_ns() // 1000
        if not torch.cuda.is_initialized():
            if not self._is_awaited and torch.version.cuda is not None:
                self._is_awaited = True
                ON_INIT.value(self._begin_late)
        else:
            self._begin()

    def _begin_late(self) -> None:
        self._is_awaited = False
        # An error would be one of the user's first use of the GPU.
        with contextlib.suppress(Exception):
            self._begin()

    def _begin(self) -> None:
        if self._is_wanted and active() is None and not history_is_on():
            self.resume()

    def resume(self) -> None:
        """Begin the history anew."""
        self.is_on = True
        begin_history(_LASTING_EVENTS)

    def end(self) -> None:
        """End the history, unless it is the user's."""
        self._is_wanted = False
        if self.is_on:
            self.is_on = False
            end_history()


lasting = LastingHistory()
"""The history of this process."""


class AllocatorHistory:
    """The history of a CUDA device during one recording, of which at most `most_events` are kept."""

    def __init__(self, device: torch.device, most_events: int) -> None:
        self._device = device
        self._most_events = most_events
        self._is_users = self._is_ours = False
        self._began_us = 0

    def begin(self) -> None:
        """Begin a history, or note the time in the history that the user records."""
        torch.cuda.synchronize(self._device)
        self._began_us = time.time_ns() // 1000
        self._is_users = history_is_on() and not lasting.is_on
        if not self._is_users:
            self._is_ours = True
            begin_history(self._most_events)

    def read(self) -> History | None:
        """Return the history since `begin`, with the state of the allocator before; None if it has nothing."""
        torch.cuda.synchronize(self._device)
        with tempfile.TemporaryDirectory() as folder:
            path = os.path.join(folder, "history.pickle")
            DUMP_SNAPSHOT.value(path)
            devices = {recorded.device: recorded for recorded in read(path)}
        recorded = devices.get(self._device.index or 0)
        if recorded is None:
            return None
        return history_of(since(recorded, self._began_us) if self._is_users else recorded)

    def end(self) -> None:
        """End the history, unless it is the user's. It may be called twice."""
        if self._is_ours:
            self._is_ours = False
            if lasting.is_on:
                lasting.resume()
            else:
                end_history()


def history_of(recorded: Recorded) -> History:
    """Return the history that a recorded device holds."""
    tape = tape_of(recorded)
    of_stack = np.array([*map(_number, recorded.stacks), -1], dtype=np.int64)
    return History(tape, np.append(np.full(len(tape) - len(recorded.stack), -1), of_stack[recorded.stack]))


def _number(stack: list[dict[str, Any]]) -> int:
    return next((number for frame in stack if (number := number_of(frame["filename"], frame["line"])) >= 0), -1)


def since(recorded: Recorded, time_us: int) -> Recorded:
    """Return a recorded device without the events before a time, in microseconds; events without a clock are kept."""
    kept = (recorded.time < 0) | (recorded.time >= time_us)
    first = int(np.argmax(kept)) if kept.any() else len(kept)
    return dataclasses.replace(recorded, **{name: getattr(recorded, name)[first:] for name in _COLUMNS})
