"""Find the steps of a watched run in its module calls and optimizer steps, and store each in a `Store`.

A step ends when the optimizer has stepped; several optimizers that step without a forward pass in between end one step
together. Micro-batches of an accumulated step belong to it. A step that a gradient scaler skips ends as well.
"""

from __future__ import annotations

import contextlib
import sys
import time
import warnings
import weakref
from collections.abc import Callable, Iterator, Sequence
from threading import get_ident
from typing import Any

import torch

from memexplore.live.compiled import COMPILED, CompiledModels
from memexplore.live.control import Control
from memexplore.live.counters import Counters, Occasional, resident
from memexplore.live.layer_meter import LayerMeter
from memexplore.live.optimizers import Optimizers
from memexplore.live.recording import Recording, remove_modes
from memexplore.live.schedule import Cause, Schedule
from memexplore.live.shapes import shapes_of
from memexplore.live.store import Current, Store
from memexplore.ranks.rows import StepRow
from memexplore.recorder import endings, stacks
from memexplore.recorder.module_hooks import Names
from memexplore.tape import Ending
from memexplore.torch_internals.modules import is_compiled
from memexplore.torch_internals.state import is_inside_compiled
from memexplore.torch_internals.tensors import current_autograd_node

_SECONDS_OUTSIDE, _SECONDS_RESIDENT, _clock = 1.0, 0.1, time.perf_counter


class Watcher:
    """Counts the steps of one run. No tensor, model or optimizer is kept alive."""

    def __init__(
        self,
        models: Sequence[torch.nn.Module],
        optimizers: Sequence[torch.optim.Optimizer],
        counters: Counters,
        record: Callable[[int], Recording],
        schedule: Schedule,
        hides_modules: bool,
    ) -> None:
        self.counters, self.schedule, self._record = counters, schedule, record
        self.names = Names()
        self.store = Store(lambda: counters.capacity, schedule, self.names)
        self.layers = LayerMeter(self.names, counters.allocated)
        self.hook_calls: Callable[[bool], None] = lambda on: None
        """Installs or removes the hooks `before_call` and `after_call`."""
        self.error = ""
        self.failed: Callable[[], None] = lambda: None
        """Called after an error of memexplore's own."""
        self.own_seconds = 0.0
        """Seconds at borders of steps and of outermost calls, without those for recordings."""
        self.optimizer_calls = 0
        self.recording: Recording | None = None
        self._roots = [weakref.ref(model) for model in models]
        self._any_model = not models
        self._optimizers = Optimizers(self._roots, optimizers)
        self.control = Control(models, self._optimizers, self.store, hides_modules)
        self._outside = Occasional(counters.outside, _SECONDS_OUTSIDE)
        self._resident = Occasional(resident, _SECONDS_RESIDENT)
        self.thread: int | None = None
        """The thread that trains; calls in others are not watched."""
        self._outer: int | None = None
        """Id of the model whose call runs."""
        self._hooked: int | None = None
        """The same where a hook has seen the call."""
        self._nested = 0
        """Calls of that model inside of its own call."""
        self._every_call = not models
        """Whether a call of any watched module is one of a model, as where methods of the model call its layers."""
        self._trains = False
        self._measures_layers = False
        self._hides_modules, self._compiled = hides_modules, CompiledModels(self.store)
        self._keep_hooks_off = False
        """Whether the model is compiled: hooks and dispatch modes would make the compiler compile it again."""
        self._peak_before = 0
        self._stepped: set[int] = set()
        """Ids of optimizers that have stepped in this step."""
        self._ended_by: set[int] = set()
        """Ids of optimizers that ended the last step."""
        self._together = 1
        """Optimizers that step without a forward pass in between, as seen so far."""
        self._in_backward = False
        self.step = Current(0, _clock(), 0)
        for model in models:
            self.layers.adopt(model)

    def _is_watched(self, module: torch.nn.Module) -> bool:
        if self._any_model and self.layers.number(module) < 0:
            self.layers.adopt(module)
            if self._hides_modules and is_compiled(module):
                self._without_hooks()
        return self.layers.number(module) >= 0 and not (self._any_model and self._keep_hooks_off)

    def _without_hooks(self) -> None:
        """Watch without hooks on calls and without recordings from now on."""
        self._keep_hooks_off, self._measures_layers = True, False
        self.store.add_note(COMPILED)
        self.step.recorded = ""
        self.abandon()
        self.hook_calls(False)

    # -- calls of models

    def call_model(self, original: Callable[..., Any], module: torch.nn.Module, args: Any, kwargs: Any) -> Any:
        """Call a model by `original`, the `__call__` of its class, and note that it is called."""
        if torch.compiler.is_compiling():
            return original(module, *args, **kwargs)
        is_root = any(root() is module for root in self._roots)
        if self._outer is not None or not is_root or current_autograd_node() is not None:
            return original(module, *args, **kwargs)
        if self.thread is not None and self.thread != get_ident():
            return original(module, *args, **kwargs)
        try:
            self._call_begins(module, args, kwargs)
        except Exception as error:
            self._fail(error)
            return original(module, *args, **kwargs)
        try:
            return original(module, *args, **kwargs)
        finally:
            if self._outer == id(module):
                self._call_ends()

    def before_call(self, module: torch.nn.Module, args: Any) -> None:
        """Forward pre-hook of every module, in steps that need it; the frame that calls it has the named arguments."""
        if torch.compiler.is_compiling():
            return
        try:
            if self._outer is None and self._every_call and current_autograd_node() is None:
                if (self.thread is None or self.thread == get_ident()) and self._is_watched(module):
                    self._call_begins(module, args, sys._getframe(1).f_locals.get("kwargs"))
                    self._hooked = id(module)
            elif self._hooked == id(module):
                self._nested += 1
            if self.layers.is_open:
                self.layers.begin(module)
            if self.recording is not None:
                self.recording.recorder.call_begins(module, args, stacks.caller(1))
        except Exception as error:
            self._fail(error)

    def after_call(self, module: torch.nn.Module, args: Any, result: Any) -> None:
        """Forward hook, also called where the forward pass raised."""
        if torch.compiler.is_compiling():
            return
        try:
            if self.recording is not None:
                self.recording.recorder.call_ends(module)
            if self.layers.is_open:
                self.layers.end()
            if self._hooked == id(module):
                if self._nested:
                    self._nested -= 1
                else:
                    self._call_ends()
        except Exception as error:
            self._fail(error)

    def _call_begins(self, module: torch.nn.Module, args: Any, kwargs: Any) -> None:
        began = _clock()
        self._trains = torch.is_grad_enabled()
        if self._trains or self.thread is None:
            self.thread = get_ident()
            if self.recording is not None and not self.recording.is_of_this_thread:
                # The block began in another thread than the one that trains.
                self.abandon()
                self._begin_recording(Cause(self.step.recorded))
        if self._trains:
            if self._stepped and len(self._stepped) >= self._optimizers.chosen:
                self._end_step()
            call = self.layers.number(module), module.training, shapes_of(args, kwargs or {})
            self.control.called(module)
            self.step.called(call)
            is_new = self.recording is None and not self._keep_hooks_off and not self.store.has_seen(call)
            if is_new and self.schedule.on_new_shapes():
                self._begin_recording(Cause.NEW_SHAPES)
            if self.recording is not None and not self.recording.called(args, kwargs, self.step.micro_batches):
                self.abandon()
            if self._measures_layers:
                self.layers.open()
        else:
            self.step.evaluates((self.layers.number(module), module.training, shapes_of(args, kwargs or {})))
            self._peak_before = self.counters.peak()
        self._outer = id(module)
        self.own_seconds += _clock() - began

    def _call_ends(self) -> None:
        self._close_call()
        began = _clock()
        # At the end of a forward pass little less than the peak is allocated: a device may have nothing better.
        peak = self.counters.peak()
        if not self._trains and peak > self._peak_before:
            self.step.validation_peak = max(self.step.validation_peak, peak)
        self.own_seconds += _clock() - began

    def _close_call(self) -> None:
        self._outer, self._hooked, self._nested = None, None, 0
        self.layers.close()

    # -- hooks of optimizers

    def before_optimizer(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        """Hook before an optimizer's step."""
        try:
            self._in_backward = current_autograd_node() is not None or is_inside_compiled()
            if self.recording is not None:
                self.recording.recorder.optimizer_begins(optimizer, stacks.caller(2))
        except Exception as error:
            self._fail(error)

    def after_optimizer(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        """Hook after an optimizer's step."""
        try:
            self.optimizer_calls += 1
            if self.recording is not None:
                self.recording.recorder.optimizer_ends(optimizer)
            if self._optimizers.end_steps(optimizer):
                self._optimizers.note_state(optimizer)
                self._optimizer_done(id(optimizer))
        except Exception as error:
            self._fail(error)

    def skipped(self, optimizer: torch.optim.Optimizer) -> None:
        """Note that a gradient scaler did not call the step of an optimizer, because gradients were not finite."""
        try:
            if self._optimizers.end_steps(optimizer):
                self.step.skipped = True
                self._optimizer_done(id(optimizer))
        except Exception as error:
            self._fail(error)

    def _optimizer_done(self, identity: int) -> None:
        self._close_call()
        if not self._stepped and not self.step.micro_batches and self._ended_by and identity not in self._ended_by:
            # A further optimizer after the step: it belongs to it, and from now on the step waits for it.
            self._ended_by.add(identity)
            self._together = max(self._together, len(self._ended_by))
            self._extend_last_step()
            return
        if identity in self._stepped and not self._optimizers.chosen:
            # The same optimizer again, without a forward pass: the step before had ended.
            self._end_step()
        self._stepped.add(identity)
        # Optimizers that step in backward, one for each parameter, or compiled end their step when the next one begins.
        if not self._in_backward and len(self._stepped) >= max(self._together, self._optimizers.chosen):
            self._end_step()

    @property
    def between_steps(self) -> bool:
        """Whether a step has just ended."""
        return not self._stepped

    def count(self, optimizer: torch.optim.Optimizer) -> bool:
        """Count the steps of a pause by its optimizers; return whether one ended."""
        if self._optimizers.end_steps(optimizer):
            self._stepped.add(id(optimizer))
            if len(self._stepped) >= max(self._together, self._optimizers.chosen):
                self._stepped.clear()
                self.step.number += 1
                return True
        return False

    # -- steps

    @contextlib.contextmanager
    def outside_of_step(self) -> Iterator[None]:
        """Leave the time of the block out of the step that runs, if the thread that trains is in it."""
        began = _clock()
        try:
            yield
        finally:
            if self.thread == get_ident():
                self.step.began += _clock() - began

    def pause(self) -> None:
        """Drop the step that has just begun: `count` counts it when it ends."""
        self.abandon()
        self.step.number -= 1

    def begin(self) -> None:
        """Begin to watch with a new step, at first or after a pause."""
        self.thread = None
        self._close_call()
        models = [model for model in (root() for root in self._roots) if model is not None]
        self._keep_hooks_off = self._hides_modules and self._compiled.are_run(models)
        self._stepped.clear()
        self._ended_by.clear()
        self._begin_step(_clock())

    def _begin_step(self, now: float) -> None:
        counters = self.counters
        counters.begin()
        allocated = counters.allocated() if counters.allocated is not None else 0
        self.step = Current(self.step.number + 1, now, allocated, setting=self.control.text)
        if self._keep_hooks_off:
            return
        cause = self.schedule.next(self.step.number)
        self._measures_layers = cause is None and self.layers.is_due()
        self.hook_calls(self._every_call or self._measures_layers or cause is not None)
        if cause is not None:
            self._begin_recording(cause)

    def _begin_recording(self, cause: Cause) -> None:
        self.step.recorded = cause.value
        self._measures_layers = False
        self.hook_calls(True)
        # Assigned first, so that an interrupt while it begins leaves something to undo.
        self.recording = recording = self._record(self.step.number)
        for root in self._roots:
            model = root()
            if model is not None:
                # Layers have their names in the model, also where code outside calls them one by one.
                recording.recorder.names.root(model)
        recording.begin()

    def _end_step(self) -> None:
        now = _clock()
        if not self._in_backward:
            self._together = max(self._together, len(self._stepped))
        self._ended_by, self._stepped = self._stepped, set()
        row, recording = self._row(now), self.recording
        if self._keep_hooks_off:
            self._keep_hooks_off = self._compiled.are_still_run(self.step.micro_batches)
        elif not self.step.micro_batches:
            # Not the model itself is called, but its layers.
            self._every_call = True
        self.step.layers = self.layers.take(row.seconds)
        if recording is not None:
            recording.end()
            self.recording = None
        state = self._optimizers.state_size()
        self.store.add(row, self.step, state, recording)
        newest = self.store.history.newest
        self.control.ended_step(newest or row, self.step.shapes, state)
        if self.control.waiting:
            self.control.at_border(newest, self.step.number + 1)
        self._begin_step(now)
        spent = _clock() - now
        if recording is not None:
            self.schedule.recorded(row.seconds + spent)
        else:
            self.own_seconds += spent
            self.schedule.light(row.seconds)

    def _extend_last_step(self) -> None:
        now = _clock()
        self.store.extend_newest(self._row(now))
        self.counters.begin()
        self.step.began = now

    def _row(self, now: float, error: str = "") -> StepRow:
        step, reading = self.step, self.counters.read()
        if reading.peak_allocated is None and self.recording is None:
            reading = self.store.like(step.calls)
        return step.row(now, reading, self._outside(), self._resident(), error)

    # -- the end

    def end(self, error: BaseException | None) -> None:
        """End watching; a step that an exception ended leaves its row, and its tape."""
        end = endings.end_of(error)
        if end.ending is Ending.COMPLETED:
            if self._stepped:
                self._end_step()
            self.abandon()
            return
        self.error = end.error
        if self._keep_hooks_off:
            self.store.add(self._row(_clock(), end.error), self.step, self._optimizers.state_size(), None)
            return
        row, recording = self._row(_clock(), end.error), self.recording
        self.recording = None
        try:
            if recording is not None and not (recording.is_running and recording.is_of_this_thread):
                # The exception came while the recording began or ended, or in another thread than the one that trains.
                recording.abandon()
                recording = None
            if recording is None:
                self.recording = recording = self._record(self.step.number)
                recording.begin_at_failure()
            self.recording = recording
            recording.end(end)
        finally:
            self.abandon()
        self.store.add(row, self.step, self._optimizers.state_size(), recording)

    def abandon(self) -> None:
        """End a recording without a tape; it may be called twice."""
        if self.recording is not None:
            self.recording.abandon()
            self.recording = None
        remove_modes()

    def _fail(self, error: Exception) -> None:
        """Watch no longer after an error of memexplore's own, which must not end the training."""
        self.failed()
        warnings.warn(
            f"memexplore watches no longer, because of an error of its own ({type(error).__name__}: {error}). "
            "The training goes on; please report this.",
            stacklevel=4,
        )
