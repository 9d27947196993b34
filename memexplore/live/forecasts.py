"""Predict settings of a watched run: any thread may ask, and gets a future of a `Prediction`.

The step is copied in the thread that trains, at a border of steps, before the first setting is switched on.
"""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Callable
from concurrent.futures import Future

import torch

from memexplore.live import step_copy
from memexplore.live.changes import Change
from memexplore.live.control import Control
from memexplore.live.counters import Counters
from memexplore.live.gradient_buckets import Buckets, buckets_of
from memexplore.live.observed import ObservedCall, unknown_in
from memexplore.live.prediction import ENDED, Prediction, Predictor, Request, settle
from memexplore.live.setting import inner
from memexplore.run.knobs.knobs import Knobs
from memexplore.run.machine import CPU, Machine, machine_of
from memexplore.run.search.process_settings import process_settings
from memexplore.virtual_gpu.device import active

_NO_STEP = "No training step has ended yet: ask again after one."


class Forecasts:
    """Copies the step once and asks the process of the run."""

    def __init__(self, control: Control, counters: Counters, thread: Callable[[], int | None]) -> None:
        self._control, self._counters, self._thread = control, counters, thread
        self._predictor = Predictor()
        self._packed: bytes | None = None
        self._buckets: Buckets | None = None
        self._known: dict[Knobs, Prediction] = {}
        self._known_for: ObservedCall | None = None
        """The call that the known predictions are for."""
        control.closing = self._predictor.close

    def request(self, knobs: Knobs) -> Future[Prediction]:
        """Request the prediction of a setting; a newer request may replace one that has not begun."""
        future: Future[Prediction] = Future()
        future.add_done_callback(self._keep)
        if self._thread() in (None, threading.get_ident()):
            self._begin(knobs, future)
        else:
            self._control.at_next_border(functools.partial(self._begin, knobs, future))
        return future

    def of_change(self, change: Change) -> None:
        """Add the predicted peak to a requested setting as soon as it is known."""
        known = self._known.get(change.knobs) if self._known_for is self._control.observer.call else None
        if known is not None:
            change.predicted_peak = known.peak_allocated
        else:
            self.request(change.knobs)

    def _keep(self, future: Future[Prediction]) -> None:
        prediction = future.result()
        if prediction.failed:
            return
        call = self._control.observer.call
        if call is not self._known_for:
            self._known, self._known_for = {}, call
        self._known[prediction.knobs] = prediction
        self._control.predicted(prediction.knobs, prediction.peak_allocated)

    def _begin(self, knobs: Knobs, future: Future[Prediction]) -> None:
        """Copy the step and send the request; called in the thread that trains."""
        if self._control.ended:
            settle(future, Prediction(knobs, failed=ENDED))
            return
        try:
            self._send(knobs, future)
        except _CannotPredictError as error:
            settle(future, Prediction(knobs, failed=str(error)))
        except Exception as error:
            text = f"This step cannot be predicted: {type(error).__name__}: {error}"
            settle(future, Prediction(knobs, failed=text.splitlines()[0]))

    def _send(self, knobs: Knobs, future: Future[Prediction]) -> None:
        control = self._control
        call, newest = control.observer.call, control.newest()
        if call is None or newest is None:
            raise _CannotPredictError(_NO_STEP)
        kind = unknown_in((call.args, call.kwargs))
        if kind:
            raise _CannotPredictError(f"The model is called with a {kind}, which cannot be sent to another process.")
        if self._packed is None:
            model, optimizer = self._parts()
            self._packed, self._buckets = step_copy.pack(inner(model), optimizer), buckets_of(model)
        measured = newest.peak_allocated if newest.step == control.observer.step else None
        code = self._code(control.models()) if control.observer.is_last else b""
        settings = process_settings()
        # Those of the knob are made by the prediction.
        count = max(newest.micro_batches // (control.setting.knobs.accumulation or 1), 1)
        now = control.setting.knobs
        request = Request(knobs, now, measured, call, count, self._machine, settings, self._buckets, code)
        self._predictor.submit(self._packed, request, future)

    def _code(self, models: list[torch.nn.Module]) -> bytes:
        """Return the lines of the loop that compute the loss, packed; nothing where they are not known."""
        code = self._control.lines.code(models[0]) if len(models) == 1 else None
        # Such as names that cannot be sent to another process.
        with contextlib.suppress(Exception):
            return b"" if code is None else step_copy.pack_code(code)
        return b""

    def _parts(self) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
        """Return the one model and the one optimizer of the step, as written."""
        models, optimizers = self._control.models(), self._control.optimizers()
        if self._control.setting.knobs != Knobs():
            raise _CannotPredictError("The step could not be copied before a setting was switched on: switch it off.")
        if len(models) != 1:
            raise _CannotPredictError(f"The run watches {len(models)} models: only a step of one can be predicted.")
        if len(optimizers) != 1:
            raise _CannotPredictError(f"{len(optimizers)} optimizers step: only a step with one can be predicted.")
        return models[0], optimizers[0]

    @functools.cached_property
    def _machine(self) -> Machine:
        virtual = active()
        if virtual is not None:
            return machine_of(virtual.gpu, release=virtual.release, os=virtual.os)
        on_gpu = self._counters.device.startswith("cuda")
        return machine_of(torch.device(self._counters.device) if on_gpu else CPU)


class _CannotPredictError(Exception):
    """A sentence that says why a step cannot be predicted."""
