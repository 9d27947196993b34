"""Answer for PyTorch's own memory history on the virtual GPU, by patches of `torch.cuda.memory`.

`_record_memory_history`, `_snapshot` and `_dump_snapshot` answer as on a real GPU.
"""

from __future__ import annotations

import contextlib
import itertools
import pickle
import sys
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, Protocol

from memexplore.recorder import op_numbers, tape_builder
from memexplore.recorder.recorder import Recorder
from memexplore.snapshot import as_snapshot
from memexplore.tape import Meta
from memexplore.torch_internals.cuda import DUMP_SNAPSHOT, HISTORY_IS_ON, RECORD_HISTORY, SNAPSHOT
from memexplore.virtual_gpu.patches.install import Call, Patch, Replace
from memexplore.virtual_gpu.tensors.live_storages import live_storages


class Device(Protocol):
    """The part of a virtual GPU that its history needs."""

    def watch(self, recorder: Any) -> AbstractContextManager[None]:
        """Report every request of the block to `recorder`."""


class _HistoryRecorder(Recorder):
    """Records the rows of the allocator's own history: in the backward pass no Python runs but the recording's."""

    def _made_by(self, node: Any, sequence: int, module: int) -> tuple[int, int]:
        frame = op_numbers.running()
        return -1, -1 if frame is None else self.stacks.intern_frames((frame,))


class History:
    """The allocator history of one virtual GPU, with a method for each function that scripts call."""

    def __init__(self, device: Device, meta: Callable[[], Meta]) -> None:
        self._device = device
        self._meta = meta
        self._recorder: Recorder | None = None
        self._watching = contextlib.ExitStack()
        self._max_entries = sys.maxsize

    def record(self, enabled: Any = "all", *args: Any, max_entries: int = sys.maxsize, **kwargs: Any) -> None:
        """`torch.cuda.memory._record_memory_history`: begin; end for `enabled` None or False."""
        if args:
            # The older form: (enabled: bool, record_context, trace_alloc_max_entries, trace_alloc_record_context, …).
            max_entries = args[1] if len(args) > 1 else max_entries
        if not enabled:
            # The allocator clears its buffer when it stops (recordHistory in c10/cuda/CUDACachingAllocator.cpp).
            self._watching.close()
            self._recorder = None
            return
        if self._recorder is None or kwargs.get("clear_history"):
            self._watching.close()
            self._recorder = _HistoryRecorder(live_storages)
            self._watching.enter_context(self._device.watch(self._recorder))
        self._max_entries = max_entries

    @property
    def is_on(self) -> bool:
        """Whether the history is recorded now."""
        return self._recorder is not None

    def snapshot(self, device: Any = None, **kwargs: Any) -> dict[str, Any]:
        """`torch.cuda.memory._snapshot`: the present segments, and the events since the history began."""
        recorder = self._recorder
        if recorder is None:
            recorder = Recorder(live_storages)
            with self._device.watch(recorder):
                pass
        tape = tape_builder.build(recorder, self._meta(), op_numbers.other_files())
        absent = -1 + 0 * tape.op
        result = as_snapshot(tape.replace(op=absent, module=absent))
        result["device_traces"] = [trace[-self._max_entries :] for trace in result["device_traces"]]
        # A tape counts from its begin, the allocator since 1970.
        began_us = (time.time_ns() - time.perf_counter_ns() + recorder.epoch) // 1000
        for event in itertools.chain(*result["device_traces"]):
            event["time_us"] += began_us
        if self._recorder is None:
            result["device_traces"] = [[]]
        return result

    def dump(self, filename: str = "dump_snapshot.pickle", **kwargs: Any) -> None:
        """`torch.cuda.memory._dump_snapshot`."""
        with open(filename, "wb") as file:
            pickle.dump(self.snapshot(), file)


def patches(device: Device, meta: Callable[[], Meta]) -> list[Patch]:
    """Return patches with which the history functions of `torch.cuda.memory` answer for a virtual GPU."""
    history = History(device, meta)
    return [
        # Undone last: a history that the script did not end.
        Call(unmake=lambda: history.record(None)),
        Replace(*RECORD_HISTORY, history.record),
        Replace(*HISTORY_IS_ON, lambda: history.is_on),
        Replace(*SNAPSHOT, history.snapshot),
        Replace(*DUMP_SNAPSHOT, history.dump),
    ]
