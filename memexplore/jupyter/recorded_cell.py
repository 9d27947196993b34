"""One cell, recorded for its post-mortem: on the virtual GPU that is on, else by the allocator of a real GPU."""

from __future__ import annotations

import contextlib
import sys
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from memexplore.tape import Tape


class RecordedCell:
    """A cell that is being recorded on a virtual GPU."""

    def __init__(self, device: Any, recorder: Any, watching: contextlib.ExitStack) -> None:
        self._device, self.recorder, self._watching = device, recorder, watching

    def end(self, error: BaseException | None) -> Tape | None:
        """End the recording; return the tape of a cell that ran out of memory."""
        from memexplore.recorder import endings, tape_builder
        from memexplore.recorder.recording import predicted

        self.close()
        self.recorder.finish()
        end = endings.end_of(error)
        meta = predicted(self._device)._replace(ending=end.ending, error=end.error)
        tape = tape_builder.build(self.recorder, meta)
        tape_builder.store_origins(self.recorder, tape)
        return tape if endings.out_of_memory_error(error) is not None else None

    def close(self) -> None:
        """Record no more."""
        self._watching.close()


def record_cell() -> RecordedCell | None:
    """Begin to record on the virtual GPU that is on; None where none is."""
    if "memexplore.virtual_gpu.device" not in sys.modules:
        return None
    from memexplore.recorder import module_hooks
    from memexplore.recorder.recorder import Recorder
    from memexplore.virtual_gpu.device import active
    from memexplore.virtual_gpu.tensors.live_storages import live_storages

    device = active()
    if device is None:
        return None
    runner = device.runner
    recorder = Recorder(live_storages, runner.reallocate if runner.has_earlier_tensors else None)
    with contextlib.ExitStack() as watching:
        watching.enter_context(module_hooks.hooks(recorder))
        watching.enter_context(device.watch(recorder))
        return RecordedCell(device, recorder, watching.pop_all())


def keep_history() -> None:
    """Let the allocator of a real GPU record its history, of which a post-mortem has the events from now on."""
    # Without torch no GPU is in use, and importing it takes a second.
    if "torch" in sys.modules:
        from memexplore.recorder.allocator_history import lasting

        lasting.begin()


def end_history() -> None:
    """End the history that `keep_history` began."""
    if "memexplore.recorder.allocator_history" in sys.modules:
        from memexplore.recorder.allocator_history import lasting

        lasting.end()
