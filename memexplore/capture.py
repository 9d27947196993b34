"""Recording of code as a Tape: `record` on a real or virtual device, `virtual` and `simulate` on a virtual GPU."""

from __future__ import annotations

import contextlib
import dataclasses
import platform
import warnings
from collections.abc import Callable, Iterator, Mapping
from types import FrameType
from typing import Any

import torch

import memexplore
from memexplore import gpu_catalogue
from memexplore.allocator import Settings
from memexplore.allocator.placement import system_of
from memexplore.analysis import stream_timing, verdict, verdict_content
from memexplore.analysis.picture import with_whole
from memexplore.dropped_prints import without_prints
from memexplore.gpu_catalogue import Gpu
from memexplore.process_limit import limited
from memexplore.recorder import endings, history_api, module_hooks, tape_builder
from memexplore.recorder.isolation import Unrelated
from memexplore.recorder.real_device import RealDevice, note_failure
from memexplore.recorder.recorder import Recorder
from memexplore.tape import Ending, Meta, Os, Source, Tape
from memexplore.texts import encodable
from memexplore.torch_internals import check
from memexplore.virtual_gpu.device import VirtualGpu, active, release_of, turned_on
from memexplore.virtual_gpu.dispatch.work import CheckedWorks
from memexplore.virtual_gpu.distributed.ranks import of_group
from memexplore.virtual_gpu.files import session
from memexplore.virtual_gpu.patches import processes
from memexplore.virtual_gpu.patches.install import Patched
from memexplore.virtual_gpu.tensors.live_storages import live_storages
from memexplore.virtual_gpu.tensors.values import assumptions
from memexplore.virtual_gpu.value_setting import Values

_running: list[Recorder] = []
UNLIMITED = 1 << 50
"""Bytes of a memory without a known limit: a PiB."""
_OPS, _OPS_A_ROW = 20_000, 4
"""Ops of the run with unlimited memory of a program that ran out of memory: a number, and more for each row so far."""


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

    def ended_by(self, error: BaseException) -> None:
        """Note the exception that ended the recorded program, for a caller that catches it inside the block."""
        self._end = endings.end_of(error)
        if self._recorder is not None:
            self._recorder.tag_unfinished_steps()

    @contextlib.contextmanager
    def ending_out_of_memory(self) -> Iterator[None]:
        """End the block, and with it the recorded program, without an error where a GPU has no memory left."""
        try:
            yield
        except torch.OutOfMemoryError as error:
            self.ended_by(error)

    def _thread_ended(self, end: endings.End) -> None:
        if self._end.ending is Ending.COMPLETED:
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

    def sharing_notes(self) -> tuple[str, ...]:
        """Return the notes of the tape so far on layers that share a weight; none after the block."""
        return () if self._recorder is None else self._recorder.sharing_notes()

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


def virtual(
    gpu: str | Gpu = "T4",
    *,
    release: str | None = None,
    settings: str = "",
    os: str = Os.LINUX,
    values: str | Values = Values.KNOWN,
    world: int | None = None,
    rank: int = 0,
) -> Patched[VirtualGpu]:
    """Run the block on a virtual GPU: `cuda` is available, and tensors on it take no memory.

    `gpu` is a name of the catalogue, a size such as ``24GiB`` or a `Gpu`. `release` is the torch release whose rules
    apply, by default the installed one. `settings` is a ``PYTORCH_CUDA_ALLOC_CONF`` string, by default the
    environment's. `os` is the operating system whose driver places the segments: ``linux``, ``wsl`` or ``windows``.
    `values` says which values of tensors are computed, see `memexplore.Values`. With `world` the process is `rank` of
    as many processes, as `torchrun` starts them on nodes of eight GPUs: it has the environment variables of the rank,
    and process groups have this size.

    >>> import torch
    >>> with virtual("T4"):
    ...     x = torch.ones(1000, 1000, device="cuda")
    ...     torch.cuda.memory_allocated()
    4000256
    >>> with virtual("T4"):
    ...     torch.tensor([3, 5, 7]).cuda().max().item()
    7
    >>> with virtual("H100", world=16, rank=9):
    ...     torch.distributed.init_process_group("nccl")
    ...     torch.distributed.get_world_size(), torch.cuda.current_device()
    (16, 1)

    Raises ValueError for an unknown GPU, release, operating system or setting of `values`, and for a rank that is not
    one of `world`, RuntimeError if a virtual GPU is already on.
    """
    process = of_group(rank, world)

    def make() -> VirtualGpu:
        entry = gpu if isinstance(gpu, Gpu) else gpu_catalogue.find(gpu)
        system, compute = system_of(os), Values.of(values)
        return VirtualGpu(entry, release_or_installed(release), settings_of(settings), system, compute, process)

    return turned_on(make, lambda device: history_api.patches(device, lambda: predicted(device)))


def unlimited(gpu: Gpu) -> Gpu:
    """Return a GPU with a PiB of memory, on which every step fits.

    >>> unlimited(gpu_catalogue.find("T4")).total
    1125899906842624
    """
    return dataclasses.replace(gpu, total=UNLIMITED, limit=None)


def release_or_installed(requested: str | None) -> str:
    """Return the requested torch release, else the installed one.

    Raises ValueError for a text that is not a release.
    """
    release = requested or torch.__version__.partition("+")[0]
    release_of(release)
    return release


def settings_of(text: str) -> Settings:
    """Return the allocator settings of a string, or of the environment if it is empty."""
    return Settings.parse(text or _settings_of_environment())


def _settings_of_environment() -> str:
    import os

    return os.environ.get("PYTORCH_CUDA_ALLOC_CONF") or os.environ.get("PYTORCH_ALLOC_CONF") or ""


def _late_settings(before: str) -> list[str]:
    """Return a note where the program has set allocator settings that the virtual GPU does not read any more."""
    now = _settings_of_environment()
    text = f"the program set PYTORCH_CUDA_ALLOC_CONF to {now}, too late for a virtual GPU that is on"
    return [] if now in ("", before) else [text]


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
    recording, settings = Recording(), _settings_of_environment()
    virtual_gpu = active()
    if virtual_gpu is not None and device is not None and torch.device(device).type == "cpu":
        raise RuntimeError(f"a virtual {virtual_gpu.gpu.name} is on: leave its block before the CPU is recorded")
    if virtual_gpu is None:
        real = RealDevice(versions(torch.__version__), None if device is None else torch.device(device), unrelated)
        recorder, meta, watching = real.recorder, real.meta, real.watch()
    else:
        mode = virtual_gpu.mode
        recorder = Recorder(live_storages, mode.reallocate if mode.has_earlier_tensors else None)
        meta, watching = predicted(virtual_gpu), virtual_gpu.watch(recorder)
        processes.begin()

    def finish() -> Tape:
        recorder.finish()
        found = (*assumptions, *session.report(), *_late_settings(settings)) if virtual_gpu is not None else ()
        notes = (*meta.notes, *map(encodable, found))
        end, unmeasured = recording._end, processes.report() if virtual_gpu is not None else ""
        ended = meta._replace(notes=notes, ending=end.ending, error=end.error, unmeasured=unmeasured)
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
    return {"torch": release, "memexplore": memexplore.__version__, "python": platform.python_version()}


def predicted(device: VirtualGpu) -> Meta:
    """Return the metadata of tapes of a virtual GPU."""
    gpu = device.gpu
    found = Meta(
        source=Source.PREDICTED,
        device=gpu.name,
        gpu=gpu.key,
        capacity=gpu.total - gpu.outside,
        total=gpu.total,
        settings=str(device.settings),
        versions=versions(device.release),
        notes=(gpu.note,) if gpu.note else (),
        os=device.os,
    )
    return limited(found, device.allocator.limit)


def simulate(
    function: Callable[[], Any],
    *,
    gpu: str | Gpu = "T4",
    release: str | None = None,
    settings: str = "",
    os: str = Os.LINUX,
    values: str | Values = Values.KNOWN,
    world: int | None = None,
    rank: int = 0,
) -> Tape:
    """Run a function without arguments on a virtual GPU and return its Tape.

    An out-of-memory error ends the run and is a row of the tape; every other exception is raised, with a note for each
    value that was assumed. A function that comes to its end without the GPU, or with child processes that were not
    measured, gives a warning. For the arguments see `virtual`. The value that the function returns is dropped.

    A function that runs out of memory is called a second time, with unlimited memory and without its prints: `whole` of
    the tape is that run. It is None where the second call raises an error or goes on for far longer, as a loop without
    an end does.

    >>> import torch
    >>> from memexplore.tape import Action
    >>> tape = simulate(lambda: torch.nn.Linear(1000, 1000).cuda(), gpu="T4")
    >>> int(tape.size[tape.action == Action.ALLOC].sum()) == (1000 * 1000 + 1000) * 4
    True
    """
    if not callable(function):
        raise TypeError(
            f"simulate expects a function without arguments, not {type(function).__name__}; "
            "for the tape of a Step write mx.sweep(step, [mx.Knobs()])[mx.Knobs()]"
        )
    with virtual(gpu, release=release, settings=settings, os=os, values=values, world=world, rank=rank):
        recording = record()
        try:
            with contextlib.suppress(torch.OutOfMemoryError), recording as running:
                function()
        except Exception as error:
            for note in assumptions:
                error.add_note(f"On the virtual {gpu if isinstance(gpu, str) else gpu.name}, {note}")
            raise
    tape = running.tape
    if verdict.failed_request(tape) >= 0:
        roomy = gpu if isinstance(gpu, Gpu) else gpu_catalogue.find(gpu)
        block = virtual(
            unlimited(roomy), release=release, settings=settings, os=os, values=values, world=world, rank=rank
        )
        return _with_whole(tape, function, block)
    if verdict.verdict(running.tape) in (verdict.Verdict.NOT_ON_GPU, verdict.Verdict.PARTLY_MEASURED):
        warnings.warn(verdict_content.verdict_content(tape).headline, stacklevel=2)
    return tape


def _with_whole(tape: Tape, function: Callable[[], Any], block: Patched[VirtualGpu]) -> Tape:
    """Return the tape of a function that ran out of memory together with its run in a block that has the memory."""
    with contextlib.suppress(Exception, _TooLong), block as device, without_prints(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        device.mode.work_log = CheckedWorks(OpLimit(tape, _TooLong).check)
        with record() as running:
            function()
        return with_whole(tape, running.tape)
    return tape


class _TooLong(BaseException):
    """Ends a run for its length. A BaseException, so that `except Exception` cannot catch it."""


class OpLimit:
    """A number of ops for the run with unlimited memory of a program that ran out of memory.

    A loop without an end would never end that run. `tape` is that of the run out of memory; `error` ends the other.
    """

    def __init__(self, tape: Tape, error: type[BaseException]) -> None:
        self._left, self._error = _OPS + _OPS_A_ROW * len(tape), error

    @property
    def is_exceeded(self) -> bool:
        """Whether the run was ended."""
        return self._left < 0

    def check(self) -> None:
        """Count an op; raise the error where it is one too many."""
        self._left -= 1
        if self.is_exceeded:
            raise self._error


__all__ = ["Recording", "record", "simulate", "virtual"]
