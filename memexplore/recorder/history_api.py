"""`torch.cuda.memory._record_memory_history`, `_snapshot` and `_dump_snapshot` on the virtual GPU."""

from __future__ import annotations

import contextlib
import pickle
import sys
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import torch

from memexplore.recorder import tape_builder
from memexplore.recorder.recorder import Recorder
from memexplore.snapshot import as_snapshot
from memexplore.tape import Meta
from memexplore.torch_internals.cuda import DUMP_SNAPSHOT, RECORD_HISTORY, SNAPSHOT
from memexplore.virtual_gpu.tensors import tensor

if TYPE_CHECKING:
    from memexplore.virtual_gpu.device import VirtualGpu


class _HistoryRecorder(Recorder):
    """Notes what the allocator's own history would: Python stacks as they are, so none in autograd's thread."""

    def _made_by(self, node: Any, sequence: int, module: int) -> tuple[int, int]:
        return -1, -1


class History:
    """The allocator history of one virtual GPU, under the names that scripts call."""

    def __init__(self, device: VirtualGpu, meta: Callable[[], Meta]) -> None:
        self._device = device
        self._meta = meta
        self._recorder: Recorder | None = None
        self._watching = contextlib.ExitStack()
        self._max_entries = sys.maxsize

    def record(self, enabled: Any = "all", *args: Any, max_entries: int = sys.maxsize, **kwargs: Any) -> None:
        """`torch.cuda.memory._record_memory_history`: begin, or with None or False end."""
        if args:
            # The older form: (enabled: bool, record_context, trace_alloc_max_entries, trace_alloc_record_context, …).
            max_entries = args[1] if len(args) > 1 else max_entries
        if not enabled:
            self._watching.close()
            return
        if self._recorder is None or kwargs.get("clear_history"):
            self._watching.close()
            self._recorder = _HistoryRecorder(tensor.live_storages)
            self._watching.enter_context(self._device.watch(self._recorder))
        self._max_entries = max_entries

    def snapshot(self, device: Any = None, **kwargs: Any) -> dict[str, Any]:
        """`torch.cuda.memory._snapshot`: segments now, and the events since the history began."""
        recorder = self._recorder
        if recorder is None:
            recorder = Recorder(tensor.live_storages)
            with self._device.watch(recorder):
                pass
        tape = tape_builder.build(recorder, self._meta())
        nothing = -1 + 0 * tape.op
        result = as_snapshot(tape.replace(op=nothing, module=nothing))
        result["device_traces"] = [trace[-self._max_entries :] for trace in result["device_traces"]]
        if self._recorder is None:
            result["device_traces"] = [[]]
        return result

    def dump(self, filename: str = "dump_snapshot.pickle", **kwargs: Any) -> None:
        """`torch.cuda.memory._dump_snapshot`."""
        with open(filename, "wb") as file:
            pickle.dump(self.snapshot(), file)


@contextlib.contextmanager
def patched(device: VirtualGpu, meta: Callable[[], Meta]) -> Iterator[None]:
    """Answer the history functions of `torch.cuda.memory` for a virtual GPU."""
    history = History(device, meta)
    names: dict[str, Any] = {
        RECORD_HISTORY.name: history.record,
        SNAPSHOT.name: history.snapshot,
        DUMP_SNAPSHOT.name: history.dump,
    }
    before = {name: getattr(torch.cuda.memory, name) for name in names}
    try:
        for name, function in names.items():
            setattr(torch.cuda.memory, name, function)
        yield
    finally:
        for name, function in before.items():
            setattr(torch.cuda.memory, name, function)
        history.record(None)
