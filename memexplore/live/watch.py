"""Watch the steps of a block: `watch` puts hooks on a model and its optimizer.

The hooks are entries of torch's tables of hooks under a key of memexplore's own, `__call__` of the model's class,
`training_step` and `validation_step` of a LightningModule, `GradScaler.step` and `UntypedStorage.resize_`. How to undo
each change is noted before it is made, and undoing may be repeated, so an interrupt at any line leaves nothing.
"""

from __future__ import annotations

import inspect
import io
import os
import sys
import time
import warnings
import weakref
from collections.abc import Callable, Generator, Iterable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from memexplore.live.compiled import leave_own_code_alone
from memexplore.live.counters import counters_of
from memexplore.live.live import Live, Overhead, State
from memexplore.live.noted_calls import noting_calls, noting_skips
from memexplore.live.optimizers import several, unwrapped
from memexplore.live.rank_folder import writer_of
from memexplore.live.recording import Recording
from memexplore.live.schedule import Schedule
from memexplore.live.storages_at_start import StoragesAtStart
from memexplore.live.watcher import Watcher
from memexplore.ranks.writer import Writer
from memexplore.recorder import endings
from memexplore.recorder.real_device import RealMode, noting_resizes
from memexplore.tape import Ending
from memexplore.torch_internals import check
from memexplore.torch_internals.modules import CALL, GLOBAL_HOOKS
from memexplore.torch_internals.state import (
    ALWAYS_CALLED_HOOKS,
    DISPATCH_FLAGS,
    OPTIMIZER_POST_HOOKS,
    OPTIMIZER_PRE_HOOKS,
    dispatch_mode_stack,
    set_compiled_code_sees_modes,
)
from memexplore.virtual_gpu.device import active
from memexplore.virtual_gpu.patches.install import Insert, Patch, Replace, Undo

if TYPE_CHECKING:
    from memexplore.live.forecasts import Forecasts, Packed
    from memexplore.run.programs.step import Step

CALL_PRE_HOOKS, CALL_HOOKS = (table.value for table in GLOBAL_HOOKS[:2])
STEPS_OF_LIGHTNING = "training_step", "validation_step"
"""Methods by which Lightning calls a model; they call its layers, or the model itself."""
KEY = "memexplore.live"
"""Key of the hooks in torch's tables: a text, so that a model with it can be copied and saved."""
_SECONDS_FOR_HOLDERS = 0.3
on_start: list[Callable[[Session], None]] = []
"""Called with each run before it begins; a run that goes on may be ended there."""
_watching: weakref.ref[Session] | None = None


class Session:
    """One watched run: installs and removes the hooks, pauses and resumes."""

    def __init__(
        self,
        models: Sequence[torch.nn.Module],
        watcher: Watcher,
        open_folder: Callable[[], Writer] | None,
        on_begin: Sequence[Callable[[Session], None]],
        step: Step | None,
    ) -> None:
        self._models = [weakref.ref(model) for model in models]
        self._open_folder, self._on_begin = open_folder, on_begin
        self._writer: Writer | None = None
        self.watcher = watcher
        self.watcher.failed = self._failed
        self.watcher.hook_calls = self._hook_calls
        self.live = Live(self, self.watcher.store)
        self.state = State.ENDED
        self.wants_pause = False
        self.on_state: list[Callable[[], None]] = []
        """Called when `state` has changed, at the end after everything is removed."""
        self.on_error: Callable[[BaseException], None] = lambda error: None
        """Called with the exception that ends the block, while its frames are alive."""
        self._undo: Sequence[Undo] = ()
        self._modes: tuple[list[Any], list[Any]] = ([], [])
        self._began = self._ended = 0.0
        self._step = step
        self._forecasts: Forecasts | None = None
        self._pack: Callable[[], Packed] | None = None
        control = self.watcher.control
        control.can_predict = step is not None
        control.on_request = lambda change: self.forecasts().of_change(change)
        self._held_by: dict[str, list[str]] = {}
        """Line of a leak -> who holds its tensors, searched once because that takes long."""
        self._is_cleaned = False

    # -- changes in torch

    def _patches(self) -> list[Patch]:
        watcher = self.watcher
        return [
            Insert(OPTIMIZER_PRE_HOOKS, KEY, self._before_optimizer),
            Insert(OPTIMIZER_POST_HOOKS, KEY, self._after_optimizer),
            Replace(torch.amp.GradScaler, "step", noting_skips(torch.amp.GradScaler.step, watcher)),
            Replace(torch.UntypedStorage, "resize_", noting_resizes(torch.UntypedStorage.resize_, self._mode)),
            *(
                Replace(kind, name, noting_calls(getattr(kind, name), watcher))
                for kind in self._kinds()
                for name in (CALL, *STEPS_OF_LIGHTNING)
                if hasattr(kind, name)
            ),
        ]

    def _mode(self) -> RealMode | None:
        recording = self.watcher.recording
        return None if recording is None else recording.mode

    def _call_patches(self) -> list[Patch]:
        watcher = self.watcher
        return [
            Insert(CALL_PRE_HOOKS, KEY, watcher.before_call),
            Insert(ALWAYS_CALLED_HOOKS, KEY, True),
            Insert(CALL_HOOKS, KEY, watcher.after_call),
        ]

    def _hook_calls(self, on: bool) -> None:
        """Install or remove the hooks on the calls of all modules, which cost time in each of them."""
        if on and KEY not in CALL_HOOKS:
            for patch in self._call_patches():
                patch.install()
        elif not on and KEY in CALL_HOOKS:
            for patch in self._call_patches():
                patch.undo()()

    def _kinds(self) -> list[type]:
        """Return the classes of the watched models."""
        return list({type(model): None for model in (ref() for ref in self._models) if model is not None})

    def start(self) -> Live:
        """Install the hooks and begin the first step."""
        global _watching
        for notify in on_start:
            notify(self)
        other = None if _watching is None else _watching()
        if other is not None and other.state in (State.WATCHING, State.PAUSED):
            raise RuntimeError("another run is being watched: end its block before another begins")
        check.warn_if_untested()
        if self._open_folder is not None:
            # Before anything is changed: a folder may exist already.
            self._write_to(self._open_folder())
        for notify in self._on_begin:
            notify(self)
        self._modes = list(dispatch_mode_stack()), [flag.value for flag in DISPATCH_FLAGS]
        patches = self._patches()
        # The hooks on calls are installed in the steps that need them.
        self._undo = [patch.undo() for patch in (*patches, *self._call_patches())]
        _watching = weakref.ref(self)
        self.state = State.WATCHING
        for patch in patches:
            patch.install()
        self._began = time.perf_counter()
        self.watcher.begin()
        return self.live

    def _write_to(self, writer: Writer) -> None:
        store, self._writer = self.watcher.store, writer
        writer.status = self._status
        store.on_row.append(writer.add)
        store.on_explained.append(writer.explain)
        store.on_recorded.append(lambda recording: writer.add_tape(recording.step, recording.tape))

    def _status(self) -> dict[str, Any]:
        """Return what the description of the folder says besides the state."""
        leak = self.live.leak()
        if leak is not None and leak.line not in self._held_by:
            self._held_by[leak.line] = self.live.held_by(_SECONDS_FOR_HOLDERS)
        return {
            "overhead": self.overhead().share,
            "growth": leak.text if leak is not None else "",
            "full_at": leak.full_at if leak is not None else None,
            "held_by": self._held_by[leak.line] if leak is not None else [],
            "notes": list(self.live.notes),
        }

    def hand_over(self, other: Session) -> None:
        """Leave the folder of a run that has no step yet to another run that has no folder."""
        if self._writer is not None and other._open_folder is None and self.watcher.store.history.newest is None:
            writer, self._writer = self._writer, None
            other._open_folder = lambda: writer

    def _announce(self) -> None:
        for receive in self.on_state:
            receive()

    def _before_optimizer(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        if not torch.compiler.is_compiling():
            self.watcher.before_optimizer(optimizer, args, kwargs)

    def _after_optimizer(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        """Hook after an optimizer's step, which stays installed during a pause."""
        if torch.compiler.is_compiling():
            return
        watcher = self.watcher
        if self.state is State.WATCHING:
            watcher.after_optimizer(optimizer, args, kwargs)
            if self.wants_pause and watcher.between_steps:
                self._pause()
        elif watcher.count(optimizer):
            if watcher.control.waiting:
                watcher.control.at_border(None, watcher.step.number + 1)
            if not self.wants_pause:
                self._resume()

    def _pause(self) -> None:
        self._remove_hooks()
        self.watcher.pause()
        self.state = State.PAUSED
        OPTIMIZER_POST_HOOKS[KEY] = self._after_optimizer
        self._announce()

    def _resume(self) -> None:
        self.state = State.WATCHING
        for patch in self._patches():
            patch.install()
        self.watcher.begin()
        self._announce()

    def stop(self, error: BaseException | None) -> None:
        """End the last step and remove the hooks. It may be called twice."""
        if error is not None:
            self.on_error(error)
        self._remove_hooks()
        if self.state in (State.WATCHING, State.PAUSED):
            # `sys.exit()` is no failure.
            completed = endings.end_of(error).ending is Ending.COMPLETED
            self.state = State.ENDED if completed else State.FAILED
            try:
                self.watcher.end(error)
            finally:
                self.watcher.control.stop(error)

    def clean(self) -> None:
        """Remove everything, whatever was interrupted before. It may be called twice."""
        self._remove_hooks()
        try:
            self.watcher.control.restore()
        finally:
            self._clean()

    def _clean(self) -> None:
        self.watcher.abandon()
        modes, flags = self._modes
        if dispatch_mode_stack() == modes and self._undo:
            for flag, value in zip(DISPATCH_FLAGS, flags, strict=True):
                setattr(*flag, value)
            set_compiled_code_sees_modes(flags[-1])
        self._ended = self._ended or time.perf_counter()
        if self.state in (State.WATCHING, State.PAUSED):
            self.state = State.FAILED
        if self._writer is not None:
            try:
                self._writer.flush()
                self._writer.describe(self.state, self.watcher.error)
            except OSError as error:
                warnings.warn(f"the last steps of the run could not be written: {error}", stacklevel=2)
            self._writer = None
        if not self._is_cleaned:
            self._is_cleaned = True
            self._announce()

    def _remove_hooks(self) -> None:
        for undo in reversed(self._undo):
            undo()

    def _failed(self) -> None:
        self._remove_hooks()
        self.watcher.abandon()
        self.watcher.control.ended = True
        self.state = State.FAILED

    def writer_for(self, folder: str | os.PathLike[str]) -> Writer:
        """Return a new writer of a folder for this process's rank."""
        return writer_of(folder, self.watcher.counters)

    def predict_with(self, pack: Callable[[], Packed]) -> None:
        """Predict settings with another program where the run was given no step."""
        self._pack, self.watcher.control.can_predict = pack, True

    def forecasts(self) -> Forecasts:
        """Return the predictions of the run, which begin with the first request."""
        from memexplore.live.forecasts import Forecasts, packed_step

        if self._forecasts is None:
            watcher = self.watcher
            pack = self._pack if self._step is None and self._pack is not None else partial(packed_step, self._step)
            self._forecasts = Forecasts(watcher.control, watcher.counters, lambda: watcher.thread, pack)
        return self._forecasts

    def overhead(self) -> Overhead:
        """Return what watching has cost so far."""
        seconds = (self._ended or time.perf_counter()) - self._began
        watcher = self.watcher
        light = watcher.own_seconds + watcher.layers.seconds
        recorded = watcher.schedule.spent
        rest = max(seconds - light - recorded, 1e-9)
        return Overhead((light + recorded) / rest, light / rest, recorded / rest)


class Watching(io.IOBase):
    """Context manager of a watched run: its value is a `Live`.

    Its `__exit__` is `io.IOBase`'s, which is written in C and calls `close`, and `close` is a generator's.
    So no line of Python runs between the end of the block and the `finally` that removes the hooks.
    """

    def __init__(self, make: Callable[[], Session]) -> None:
        self._block = _block(make)
        self.close = self._block.close  # type: ignore[method-assign]

    def __enter__(self) -> Live:  # type: ignore[override]
        if inspect.getgeneratorstate(self._block) != inspect.GEN_CREATED:
            raise RuntimeError("this context manager was entered before, and it serves one block only: make a new one")
        return next(self._block)


def _block(make: Callable[[], Session]) -> Generator[Live, None, None]:
    session = make()
    del make  # it holds the models and the optimizers
    handled = sys.exc_info()[1]
    try:
        try:
            yield session.start()
        except GeneratorExit as leaving:
            # The exception that ends the block is being handled while the block is closed, maybe by other generators.
            error = leaving.__context__
            while isinstance(error, GeneratorExit):
                error = error.__context__
            session.stop(error if error is not handled else None)
        finally:
            session.clean()
    finally:
        session.clean()


def watch(
    model: torch.nn.Module | Iterable[torch.nn.Module] | None = None,
    optimizer: torch.optim.Optimizer | Iterable[torch.optim.Optimizer] | None = None,
    *,
    device: str | torch.device | None = None,
    first: int = 3,
    every: int | None = None,
    folder: str | os.PathLike[str] | None = None,
    step: Step | None = None,
    on_begin: Sequence[Callable[[Session], None]] = (),
) -> Watching:
    """Watch the training steps of a block: memory and time of every step, complete tapes of some.

    `model` is the model that trains, or several, and None for every model that is called. A step ends when the
    optimizer has stepped: `optimizer`, or all of several, by default each one that updates the model. Micro-batches of
    an accumulated step belong to it. `device` is the real device to watch, by default the virtual GPU that is on, else
    the GPU, else the CPU.

    The `first` steps, every `every`-th, the next one after the peak rose, and those whose inputs have new shapes are
    recorded completely. With `every` None, and for new shapes, as many are recorded as fit into 2 % of the time.

    `folder` names a folder that is written while the run goes on: rows of steps every few seconds, and the tapes, in a
    sub-folder for the rank that `torchrun` gives this process. `memexplore.load` reads it, also while it is written.
    `step` is the training step as a value, with the model. It is what predicts settings, on the virtual GPU and before
    the loop gets them; without it, `Live.knobs` takes only settings that cannot raise the peak or were measured before.
    The functions of `on_begin` are called with the session before the first step.

    >>> import torch
    >>> model = torch.nn.Linear(4, 4)
    >>> optimizer = torch.optim.SGD(model.parameters())
    >>> with watch(model, optimizer) as live:
    ...     for _ in range(2):
    ...         model(torch.ones(2, 4)).sum().backward()
    ...         optimizer.step()
    >>> live.steps()["step"].tolist(), live.recorded
    ([1, 2], [1, 2])

    Raises RuntimeError if another run is being watched.
    """
    leave_own_code_alone()
    models = several(model, torch.nn.Module)
    optimizers = [unwrapped(named) for named in several(optimizer, torch.optim.Optimizer)]
    chosen = None if device is None else torch.device(device)
    if every is not None and every < 1:
        raise ValueError(f"every is a number of steps from 1 on, not {every}")

    def make() -> Session:
        counters = counters_of(chosen)

        at_start = StoragesAtStart() if active() is not None else None

        def record(step: int) -> Recording:
            virtual = active()
            device = torch.device("cpu" if virtual is not None else counters.device)
            return Recording(step, virtual, device, at_start)

        # On a virtual GPU compiled code runs eagerly.
        hides_modules = active() is None
        watcher = Watcher(models, optimizers, counters, record, Schedule(first, every), hides_modules)
        open_folder = None if folder is None else partial(writer_of, folder, counters)
        return Session(models, watcher, open_folder, on_begin, step)

    return Watching(make)
