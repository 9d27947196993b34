"""The allocator's own history of one step on a CUDA device, joined with what the recorder saw of it.

In: the history of the allocator from the begin of a step on, and the recorder's tape of the step. Out: one tape with
every request, workspaces and temporaries of kernels among them. A history that the user records goes on with the user's
settings; then the events since the begin of the step are cut out of it.
"""

from __future__ import annotations

import dataclasses
import os
import tempfile
import time
from typing import Any

import numpy as np
import torch

from memexplore.recorder import cuda
from memexplore.snapshot import read
from memexplore.snapshot.history import tape_of
from memexplore.snapshot.recorded import Recorded
from memexplore.tape import Action, Tape
from memexplore.torch_internals.cuda import DUMP_SNAPSHOT, RECORD_HISTORY, history_is_on
from memexplore.units import size_text

MOST_EVENTS = 500_000
"""Events that the allocator keeps of a step; of a longer one the first are lost."""
_COLUMNS = ("action", "address", "size", "stream", "time", "stack")


class AllocatorHistory:
    """The history of a CUDA device during one recorded step."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._is_users = self._is_ours = False
        self._began_us = 0

    def begin(self) -> None:
        """Begin a history, or note the time in the one that the user records."""
        torch.cuda.synchronize(self._device)
        self._began_us = time.time_ns() // 1000
        self._is_users = history_is_on()
        if not self._is_users:
            self._is_ours = True
            RECORD_HISTORY.value(max_entries=MOST_EVENTS, stacks="python")

    def read(self) -> Tape | None:
        """Return the history since `begin`, with the state of the allocator before; None if it has nothing."""
        torch.cuda.synchronize(self._device)
        with tempfile.TemporaryDirectory() as folder:
            path = os.path.join(folder, "history.pickle")
            DUMP_SNAPSHOT.value(path)
            devices = {each.device: each for each in read(path)}
        recorded = devices.get(self._device.index or 0)
        if recorded is None:
            return None
        return tape_of(since(recorded, self._began_us) if self._is_users else recorded)

    def end(self) -> None:
        """End the history, but for one of the user. It may be called twice."""
        if self._is_ours:
            RECORD_HISTORY.value(enabled=None)
            self._is_ours = False


def since(recorded: Recorded, time_us: int) -> Recorded:
    """Return a recorded device without the events before a time, in microseconds; events without a clock are kept."""
    kept = (recorded.time < 0) | (recorded.time >= time_us)
    first = int(np.argmax(kept)) if kept.any() else len(kept)
    return dataclasses.replace(recorded, **{name: getattr(recorded, name)[first:] for name in _COLUMNS})


def joined(history: Tape, recorded: Tape) -> Tape:
    """Return the allocator's rows with op, layer, phase, step and category of the recorder (`recorder.cuda.annotate`).

    A note of the tape says how much was requested by code that the recorder did not see, such as compiled regions, CUDA
    graphs and other threads.
    """
    tape = cuda.annotate(history, recorded)
    unseen = (tape.action == Action.ALLOC) & (tape.op < 0)
    if not unseen.any():
        return tape
    meta: Any = tape.meta
    note = (
        f"{int(unseen.sum())} of {int((tape.action == Action.ALLOC).sum())} requests "
        f"({size_text(int(tape.size[unseen].sum()))}) are attributed to no op: code that PyTorch's dispatcher does not "
        "run made them, such as compiled regions, CUDA graphs or other threads."
    )
    return tape.replace(meta=meta._replace(notes=(*meta.notes, note)))
