"""Record one step completely, from border to border, as a Tape.

The recorder and its devices are as in `mx.record`. Module and optimizer hooks are the caller's, which passes calls
on to `recorder`. The dispatch mode of a real device lies below all modes of the user, so that their blocks may begin
and end in any order while it is on.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch

from memexplore.analysis.curves import peak
from memexplore.live.storages_at_start import StoragesAtStart
from memexplore.live.unseen_requests import joined
from memexplore.recorder import cuda, earlier_blocks, endings, tape_builder
from memexplore.recorder.allocator_history import AllocatorHistory, History
from memexplore.recorder.earlier_blocks import NOTHING_EARLIER, Untouched
from memexplore.recorder.events import Event
from memexplore.recorder.real_device import CudaMode, RealMode
from memexplore.recorder.recorder import Recorder
from memexplore.recorder.recording import predicted, versions
from memexplore.tape import Action, Category, Frame, Meta, Phase, Source, Tape
from memexplore.torch_internals.state import compiler_is_used, dispatch_mode_stack
from memexplore.virtual_gpu.device import VirtualGpu
from memexplore.virtual_gpu.patches.modes import set_dispatch_modes
from memexplore.virtual_gpu.tensors.live_storages import live_storages

_ACTION, _SIZE, _PHASE, _MODULE, _GRAD, _CALL, _CATEGORY = (
    Event._fields.index(name) for name in ("action", "size", "phase", "module", "grad", "call", "category")
)
_ALLOC, _FREE, _PREEXISTING = int(Action.ALLOC), int(Action.FREE_REQUESTED), int(Action.PREEXISTING)
_FORWARD, _UNKNOWN = int(Phase.FORWARD), int(Category.UNKNOWN)
_OWNED = (
    Category.PARAMETER,
    Category.BUFFER,
    Category.OPTIMIZER_STATE,
    Category.GRADIENT,
    Category.GATHERED_PARAMETER,
    Category.GRADIENT_BUCKET,
)
MOST_SURVIVORS = 2000
MOST_EVENTS = 500_000
"""Events that the allocator keeps of a step; of a longer one the first are lost."""
MOST_CALLS = 20
"""Calls of a model after which a recording is dropped where the optimizer's step may be compiled and never seen."""
COMPILED_FUNCTIONS = (
    "torch.compile was used in this process: what compiled functions allocate inside has no layer and no line, or is "
    "missing."
)
_NO_DEVICE = torch.device("meta")
"""A device whose tensors have no memory."""
_left_on: list[Recording] = []
"""Recordings that another thread than theirs has ended."""


class _LetsCompile:
    """Lets functions be compiled while a mode is on; without this they would run eagerly also in all later steps."""

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Return True (`torch.utils._python_dispatch.TorchDispatchMode`)."""
        return True


class _CpuMode(_LetsCompile, RealMode):
    pass


class _GpuMode(_LetsCompile, CudaMode):
    pass


class Survivor(NamedTuple):
    """A block that its step left allocated and that is neither weight, gradient nor optimizer state."""

    storage: weakref.ref[Any]
    size: int
    layer: str
    stack: tuple[Frame, ...]
    step: int


def _outermost_ends(ends: Sequence[int]) -> Iterator[int]:
    """Yield the rows at which calls end that are inside no other; `ends` has the ends of all calls by their begin.

    >>> list(_outermost_ends([5, 3, 5, 9]))
    [5, 9]
    """
    last = -1
    for end in ends:
        if end > last:
            last = end
            yield end


class Recording:
    """The recorder of one step, from `begin` to `end`, and then its tape.

    `recorder` is None when the tape was built.
    """

    def __init__(
        self,
        step: int,
        virtual: VirtualGpu | None,
        device: torch.device,
        at_start: StoragesAtStart | None = None,
    ) -> None:
        """`at_start` has the storages that are older than the watched run."""
        self.step = step
        self._at_start = at_start
        self._virtual = virtual
        self.recorder: Any
        self.mode: Any = None
        """The dispatch mode of a real device."""
        if virtual is not None:
            adopt = virtual.runner.reallocate if virtual.runner.has_earlier_tensors else None
            self.recorder, self._meta = Recorder(live_storages, adopt), predicted(virtual)
        else:
            on_gpu = device.type == "cuda"
            self.mode = (_GpuMode if on_gpu else _CpuMode)(device)
            self.recorder = self.mode.recorder
            release = versions(torch.__version__)
            self._meta = cuda.meta(device, release) if on_gpu else Meta(Source.MEASURED, "cpu", versions=release)
        self.survivors: tuple[Survivor, ...] = ()
        self.peak = self.left = 0
        """Highest sum of the storages in use, and their sum at the end: exact where there is no allocator."""
        self.allocator_peaks: tuple[int, int] | None = None
        """Peaks allocated and reserved of the step, from the history of a CUDA device."""
        self.kept_by_layer: dict[str, int] = {}
        """Name of a layer -> the most bytes of its activations at the end of a call of the model."""
        self._tape: Tape | None = None
        self._lock = threading.Lock()
        self._watch: Any = None
        self._history = AllocatorHistory(device, MOST_EVENTS) if virtual is None and device.type == "cuda" else None
        self._allocator_history: History | None = None
        self._device, self._earlier = device, NOTHING_EARLIER
        self.began_at_failure = False
        """Whether the recorder has seen nothing of the step."""
        self.is_running = False
        """Whether `begin` came to its end and `end` has not begun."""
        self._thread = threading.get_ident()

    @property
    def is_of_this_thread(self) -> bool:
        """Whether the calling thread can end the recording: a dispatch mode is on in the thread that began it."""
        return self._virtual is not None or self._thread == threading.get_ident()

    def begin(self) -> None:
        """Begin to record."""
        if self._virtual is not None:
            self._watch = self._virtual.watch(self.recorder)
            self._watch.__enter__()
            self._note_kept()
        else:
            if self._history is not None:
                self._history.begin()
            self.mode.__enter__()
            lowest_first(self.mode)
        self.is_running = True

    def _note_kept(self) -> None:
        """Note the blocks of the virtual GPU that earlier steps of the run made, if no recording has their origin."""
        if self._at_start is None:
            return
        for ref in list(live_storages.values()):
            storage = ref()
            row = self.recorder.open_rows.get(ref.address, -1)
            is_known = ref.origin is not None and ref.origin.category != Category.UNKNOWN
            if storage is not None and not is_known and row >= 0 and self._at_start.is_new(storage):
                self.recorder.kept.add(row)

    def called(self, args: Any, kwargs: Any, calls: int) -> bool:
        """Note the arguments of a model's call, which are inputs although an earlier step may have made them.

        Return whether the recording goes on: after many `calls` not, where a step may have ended unseen.
        """
        if self.recorder.kept:
            self.recorder.are_inputs((args, kwargs or {}))
        return calls < MOST_CALLS or self._virtual is not None or not compiler_is_used()

    def begin_at_failure(self) -> None:
        """Begin when the step has failed already: the tape then has what is allocated now."""
        self.began_at_failure = True
        note = "This step was not recorded: the tape shows what was allocated when it failed."
        self._meta = self._meta._replace(notes=(*self._meta.notes, note))
        self.begin()

    def end(self, end: endings.End = endings.COMPLETED) -> None:
        """End the recording."""
        self.is_running = False
        if self._virtual is not None:
            self._watch.__exit__(None, None, None)
        else:
            highest_last(self.mode)
            self.mode.__exit__(None, None, None)
        if self._history is not None:
            self._earlier = earlier_blocks.earlier(self._device, Untouched.KEPT)
            self._allocator_history = self._history.read()
            self._history.end()
            if self._allocator_history is not None:
                tape = self._allocator_history.tape
                self.allocator_peaks = peak(tape, "allocated")[0], peak(tape, "reserved")[0]
        self.recorder.finish()
        unseen = (COMPILED_FUNCTIONS,) if self._virtual is None and compiler_is_used() else ()
        self._meta = self._meta._replace(ending=end.ending, error=end.error, notes=(*self._meta.notes, *unseen))
        self.survivors = tuple(self._survivors())
        self._sum_up()
        if self._virtual is not None:
            recorder = self.recorder
            tape_builder.store_origins(recorder, self.tape)
        else:
            # Frees after the end would be events of this recording.
            self.mode.live.clear()

    def abandon(self) -> None:
        """End the recording without a tape, from any state; it may be called twice."""
        if self._virtual is not None:
            self._virtual.unwatch(self.recorder)
        else:
            if self._history is not None:
                self._history.end()
            remove(self.mode)
            if not self.is_of_this_thread:
                # The mode stays on in its thread, where it records nothing, until `remove_modes` of that thread.
                self.mode.device = _NO_DEVICE
                _left_on.append(self)
            self.mode.live.clear()

    def _sum_up(self) -> None:
        """Set the numbers that are needed in any case from the events, because building the tape takes longer."""
        recorder = self.recorder
        ends = iter(_outermost_ends(recorder.call_ends_at))
        end = next(ends, -1)
        older = used = peak = held = most = most_at = 0
        made: dict[int, tuple[int, int]] = {}
        """Row -> layer and size of an activation that was made in forward."""
        freed_at: dict[int, int] = {}
        for row, event in enumerate(recorder.events):
            while row == end:
                if held > most:
                    most, most_at = held, row
                end = next(ends, -1)
            action = event[_ACTION]
            if action == _ALLOC:
                size = event[_SIZE]
                used += size
                if used > peak:
                    peak = used
                if event[_CALL] >= 0 and event[_GRAD] and event[_PHASE] == _FORWARD and event[_CATEGORY] == _UNKNOWN:
                    made[row] = event[_MODULE], size
                    held += size
            elif action == _FREE:
                used -= event[_SIZE]
                if event[_CALL] in made:
                    freed_at[event[_CALL]] = row
                    held -= event[_SIZE]
            elif action == _PREEXISTING:
                older += event[_SIZE]
        if held > most:
            most_at = len(recorder.events)
        self.peak = older + peak
        self.left = sum(recorder.events[row][_SIZE] for row in recorder.open_rows.values())
        self.kept_by_layer = self._kept_by_layer(
            (row, module, size) for row, (module, size) in made.items() if row < most_at <= freed_at.get(row, most_at)
        )

    def _kept_by_layer(self, alive: Iterable[tuple[int, int, int]]) -> dict[str, int]:
        """Return the bytes of activations by name of a layer, of blocks with their row, layer and size."""
        sizes: dict[int, int] = {}
        for row, module, size in alive:
            if self.recorder.tags.categories.get(row) not in _OWNED:
                sizes[module] = sizes.get(module, 0) + size
        names = self.recorder.names.table
        return {names[number]: size for number, size in sorted(sizes.items()) if size}

    @property
    def is_built(self) -> bool:
        """Whether the tape was built."""
        return self._tape is not None

    @property
    def tape(self) -> Tape:
        """The tape of the step, built at the first use; its rows have the number of the watched step."""
        with self._lock:
            if self._tape is None:
                self._tape = self._build()
                self.recorder = None
            return self._tape

    def __len__(self) -> int:
        return len(self.recorder.events) if self._tape is None else len(self._tape)

    def _build(self) -> Tape:
        tape = tape_builder.build(self.recorder, self._meta)
        if tape.meta.capacity is not None:
            tape = tape.replace(meta=tape.meta._replace(trained_on_cpu=self.recorder.training.models(tape)))
        history, self._allocator_history = self._allocator_history, None
        if history is not None:
            tape = joined(history.tape, tape, self.mode.numbers_in(history), self._earlier)
            earlier_blocks.keep_workspaces(self._device, tape)
        step = np.where(tape.step > 0, self.step, 0).astype(tape.step.dtype)
        step.flags.writeable = False
        return tape.replace(step=step)

    def _survivors(self) -> list[Survivor]:
        recorder = self.recorder
        allocated = []
        for ref in list(recorder.live.values()):
            row = recorder.open_rows.get(ref.address, -1)
            if row < 0 or recorder.events[row][_ACTION] != Action.ALLOC or recorder.tags.categories.get(row) in _OWNED:
                continue
            allocated.append((recorder.events[row], ref))
        allocated.sort(key=lambda pair: -pair[0][_SIZE])
        result = []
        for event, ref in allocated[:MOST_SURVIVORS]:
            storage = ref()
            if storage is not None:
                fields = Event(*event)
                layer = recorder.names.table[fields.module] if fields.module >= 0 else ""
                stack = recorder.stacks.resolve(fields.stack, tape_builder.OWN) if fields.stack >= 0 else ()
                result.append(Survivor(weakref.ref(storage), fields.size, layer, stack, self.step))
        return result


def remove_modes() -> None:
    """Remove the modes of recordings that other threads have ended from the calling thread."""
    for recording in [ended for ended in _left_on if ended.is_of_this_thread]:
        remove(recording.mode)
        _left_on.remove(recording)


def lowest_first(mode: Any) -> None:
    """Move a dispatch mode below all others of the calling thread."""
    modes = dispatch_mode_stack()
    if modes and modes[0] is not mode:
        set_dispatch_modes([mode, *(other for other in modes if other is not mode)])


def highest_last(mode: Any) -> None:
    """Move a dispatch mode above all others of the calling thread, so that its own block can end."""
    modes = dispatch_mode_stack()
    if modes and modes[-1] is not mode:
        set_dispatch_modes([*(other for other in modes if other is not mode), mode])


def remove(mode: Any) -> None:
    """Remove a dispatch mode from the calling thread, wherever it lies."""
    modes = dispatch_mode_stack()
    if any(other is mode for other in modes):
        set_dispatch_modes([other for other in modes if other is not mode])
