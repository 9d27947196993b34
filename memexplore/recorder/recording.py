"""Record a block of code as a Tape, on the running virtual GPU or on a real device."""

from __future__ import annotations

import contextlib
import platform
from collections.abc import Callable, Iterator, Mapping
from types import FrameType

import torch

from memexplore.analysis import stream_timing
from memexplore.hardware.outside_allocator import LOADING, Loading
from memexplore.recorder import endings, module_hooks, tape_builder
from memexplore.recorder.isolation import Unrelated
from memexplore.recorder.real_device import RealDevice, note_failure
from memexplore.recorder.recorder import Recorder
from memexplore.tape import Ending, Meta, Source, Tape
from memexplore.tape.allocator_settings import settings_of_environment
from memexplore.tape.process_limit import limited
from memexplore.text.package import VERSION
from memexplore.text.untrusted import encodable
from memexplore.torch_internals import check
from memexplore.virtual_gpu import extension_errors
from memexplore.virtual_gpu.device import VirtualGpu, active
from memexplore.virtual_gpu.files import session
from memexplore.virtual_gpu.patches import processes
from memexplore.virtual_gpu.tensors.live_storages import live_storages
from memexplore.virtual_gpu.values.notes import notes_of_run

_running: list[Recorder] = []


class Recording:
    """A running recording, as `record` yields it; `tape` is available after its block, also after an exception."""

    _tape: Tape | None = None
    _recorder: Recorder | None = None
    _failure: Exception | None = None
    _end: endings.End = endings.COMPLETED

    @property
    def recorder(self) -> Recorder | None:
        """The running recorder, None after the block."""
        return self._recorder

    @property
    def ending(self) -> Ending:
        """How the recorded program has ended, as far as that is known."""
        return self._end.ending

    def ended_by(self, error: BaseException) -> None:
        """Note the exception that ended the recorded program, for a caller that catches it inside the block."""
        if active() is not None:
            extension_errors.explain(error)
        self._end = endings.end_of(error)
        if self._recorder is not None:
            self._recorder.tag_unfinished_steps()
            self._recorder.tag_states()

    @contextlib.contextmanager
    def ending_out_of_memory(self) -> Iterator[None]:
        """End the block, and with it the recorded program, without an error where a GPU has no memory left."""
        try:
            yield
        except torch.OutOfMemoryError as error:
            self.ended_by(error)

    def _thread_ended(self, end: endings.End) -> None:
        if self.ending is Ending.COMPLETED:
            self._end = end

    def events(self) -> list[tuple[int, ...]]:
        """Return the rows recorded so far, as `recorder.events.Event`s.

        Raises RuntimeError after the block has ended.
        """
        if self._recorder is None:
            raise RuntimeError("the recording has ended: its tape has all events")
        self._recorder.settle()
        return self._recorder.events

    def tensors(self) -> Mapping[int, str]:
        """Return the shape and dtype of the tensor that a row of `events` is for, by row (`tensor_text`).

        Raises RuntimeError after the block has ended.
        """
        if self._recorder is None:
            raise RuntimeError("the recording has ended: its tape has all tensors")
        return self._recorder.tensors

    def workspaces(self) -> Mapping[int, tuple[int, ...]]:
        """Return the sizes of the workspace that may be requested behind a row of `events`, by row.

        Raises RuntimeError after the block has ended.
        """
        if self._recorder is None:
            raise RuntimeError("the recording has ended: its tape has all workspaces")
        return self._recorder.workspaces

    def sharing_notes(self) -> tuple[str, ...]:
        """Return the notes of the tape so far on layers that share a weight; none after the block."""
        return () if self._recorder is None else self._recorder.tags.sharing_notes()

    def end_stacks_at(self, frame: FrameType) -> None:
        """Cut all stacks at a frame: the frames that called it are not part of the recorded code."""
        if self._recorder is not None:
            self._recorder.stacks.end_at(frame)

    @property
    def tape(self) -> Tape:
        """The Tape of the block.

        Raises RuntimeError while the block is running, and where the tape could not be built.
        """
        if self._failure is not None:
            raise RuntimeError("this recording has no tape: building it failed") from self._failure
        if self._tape is None:
            raise RuntimeError("the recording is still running: read its tape after the `with record()` block")
        return self._tape

    @contextlib.contextmanager
    def _finishing(self, finish: Callable[[], Tape]) -> Iterator[None]:
        """Build the tape after the block; if that fails too, raise the exception of the block."""
        unwatch = endings.watch_threads(self._thread_ended)
        try:
            yield
        except BaseException as error:
            self.ended_by(error)
            with note_failure(error, "memexplore could not build the tape of this recording"):
                self._finish(finish)
            raise
        else:
            self._finish(finish)
        finally:
            unwatch()
            self._recorder = None

    def _finish(self, finish: Callable[[], Tape]) -> None:
        try:
            self._tape = finish()
        except Exception as failure:
            self._failure = failure
            raise


@contextlib.contextmanager
def record(device: str | torch.device | None = None, unrelated: Unrelated = Unrelated.KEPT) -> Iterator[Recording]:
    """Record the memory of the block on the running virtual GPU, else on the real GPU, else on the CPU.

    `device` names a real device, such as ``cpu`` on a machine with a GPU. `unrelated` says whether the tape of a GPU
    keeps older tensors that the block does not use. An exception of the block is always raised; if the tape cannot be
    built then, the exception has a note that says why.

    >>> with record() as recording:
    ...     x = torch.zeros(1000)
    >>> tape = recording.tape
    >>> tape.meta.device, int(tape.size.max())
    ('cpu', 4000)

    Raises RuntimeError if a recording is already running, or if `device` is the CPU while a virtual GPU is on.
    """
    if _running:
        raise RuntimeError("a recording is already running: end its block before another begins")
    check.warn_if_untested()
    recording, settings = Recording(), settings_of_environment()
    virtual_gpu = active()
    if virtual_gpu is not None and device is not None and torch.device(device).type == "cpu":
        raise RuntimeError(f"a virtual {virtual_gpu.gpu.name} is on: leave its block before the CPU is recorded")
    if virtual_gpu is None:
        real = RealDevice(versions(torch.__version__), None if device is None else torch.device(device), unrelated)
        recorder, meta, watching = real.recorder, real.meta, real.watch()
    else:
        runner = virtual_gpu.runner
        recorder = Recorder(live_storages, runner.reallocate if runner.has_earlier_tensors else None)
        meta, watching = predicted(virtual_gpu), virtual_gpu.watch(recorder)
        processes.begin()

    def finish() -> Tape:
        recorder.finish()
        notes, end, unmeasured, now = meta.notes, recording._end, "", meta.settings
        if virtual_gpu is not None:
            ignored = virtual_gpu.program_settings.without_effect(settings)
            notes = (*notes, *map(encodable, (*notes_of_run(), *session.report(), *ignored)))
            unmeasured, now = processes.report(), str(virtual_gpu.settings)
        ended = meta._replace(notes=notes, ending=end.ending, error=end.error, unmeasured=unmeasured, settings=now)
        # The program may have set the limit in the block.
        ended = limited(ended, virtual_gpu.allocator.limit if virtual_gpu is not None else real.limit())
        tape = tape_builder.build(recorder, ended)
        if virtual_gpu is not None and ended.ending is not Ending.OUT_OF_MEMORY:
            late, early = tape_builder.late_ends(recorder, tape), tape_builder.early_begins(recorder, tape)
            if late:
                tape = stream_timing.with_late_peak(tape, late)
            if early:
                tape = stream_timing.with_early_peaks(tape, early)
        if meta.capacity is not None and recorder.training is not None:
            tape = tape.replace(meta=tape.meta._replace(trained_on_cpu=recorder.training.models(tape)))
        tape_builder.store_origins(recorder, tape)
        return tape if virtual_gpu is not None else real.finish(tape)

    try:
        _running.append(recorder)
        recording._recorder = recorder
        with recording._finishing(finish), module_hooks.hooks(recorder), watching:
            yield recording
    finally:
        _running.clear()


def versions(release: str) -> dict[str, str]:
    """Return the releases that a tape of a device under a torch release names."""
    return {"torch": release, "memexplore": VERSION, "python": platform.python_version()}


def predicted(device: VirtualGpu) -> Meta:
    """Return the metadata of tapes of a virtual GPU."""
    gpu = device.gpu
    meta = Meta(
        source=Source.PREDICTED,
        device=gpu.name,
        gpu=gpu.key,
        capacity=gpu.total - gpu.outside,
        total=gpu.total,
        settings=str(device.settings),
        versions=versions(device.release) | of_loading(gpu.loading),
        notes=(gpu.note,) if gpu.note else (),
        os=device.os,
    )
    return limited(meta, device.allocator.limit)


def of_loading(loading: Loading) -> dict[str, str]:
    """Return what `Meta.versions` says of the loading of kernels: nothing where it is lazy, which is usual."""
    return {} if loading is Loading.LAZY else {LOADING: loading.value.upper()}


__all__ = ["Recording", "predicted", "record", "versions"]
