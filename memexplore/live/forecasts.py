"""Predict settings of a watched run: any thread may ask, and gets a future of a `Prediction`.

What is run is the step that `watch` was given, else the cell of the notebook. It is packed in the thread that trains,
at a border of steps, before the first setting is switched on.
"""

from __future__ import annotations

import dataclasses
import functools
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import NamedTuple

import torch

from memexplore.live.changes import Change
from memexplore.live.control import Control
from memexplore.live.counters import Counters
from memexplore.live.model_pickler import ModelPickler
from memexplore.live.prediction import ENDED, Prediction, Predictor, Request, settle
from memexplore.live.setting import inner
from memexplore.run.knobs.knobs import KNOBS, Knobs
from memexplore.run.machine import CPU, Machine, machine_of
from memexplore.run.programs.step import Step
from memexplore.run.search.process_settings import process_settings
from memexplore.virtual_gpu.device import active

NO_STEP = "The step of this run is not known: give mx.watch(..., step=mx.Step(...))."
_TOO_LATE = "The program could not be copied before a setting was switched on: switch it off."


class Packed(NamedTuple):
    """A program as bytes, for the process that predicts."""

    program: bytes
    assumed: tuple[str, ...] = ()
    """What is not known of it, as sentences."""
    is_cell: bool = False
    """Whether it is a cell, whose loop is its own."""


class CannotPredictError(Exception):
    """A sentence that says why a run cannot be predicted."""


def packed_step(step: Step | None) -> Packed:
    """Return the step of a run, as it is before a setting is switched on. Raises CannotPredictError without one."""
    if step is None:
        raise CannotPredictError(NO_STEP)
    model = inner(step.model) if isinstance(step.model, torch.nn.Module) else step.model
    return Packed(dataclasses.replace(step, model=model).packed(ModelPickler))


class Forecasts:
    """Packs the program once and asks the process of the run."""

    def __init__(
        self,
        control: Control,
        counters: Counters,
        thread: Callable[[], int | None],
        pack: Callable[[], Packed],
    ) -> None:
        self._control, self._counters, self._thread, self._pack = control, counters, thread, pack
        self._predictor = Predictor()
        self._packed: Packed | None = None
        self._known: dict[Knobs, Prediction] = {}
        control.closing = self._predictor.close

    def request(self, knobs: Knobs, change: Change | None = None) -> Future[Prediction]:
        """Request the prediction of a setting; a newer request may replace one that has not begun.

        A failure of the prediction refuses `change`.
        """
        future: Future[Prediction] = Future()
        future.add_done_callback(functools.partial(self._keep, knobs, change))
        if self._thread() in (None, threading.get_ident()):
            self._begin(knobs, future)
        else:
            self._control.at_next_border(functools.partial(self._begin, knobs, future))
        return future

    def of_change(self, change: Change) -> None:
        """Let a requested setting through where its prediction fits, at once if that is known."""
        known = self._known.get(change.knobs)
        if known is not None:
            self._judge(change.knobs, known)
        else:
            self.request(change.knobs, change)

    def _keep(self, knobs: Knobs, change: Change | None, future: Future[Prediction]) -> None:
        prediction = future.result()
        if not prediction.failed:
            self._known[knobs] = prediction
            self._judge(knobs, prediction)
        elif change is not None:
            self._control.judged(knobs, None, prediction.failed, change)

    def _judge(self, knobs: Knobs, prediction: Prediction) -> None:
        measured = self._control.peak(prediction.unchanged)
        self._control.judged(knobs, prediction.peak_allocated, prediction._replace(measured_peak=measured).refusal())

    def _begin(self, knobs: Knobs, future: Future[Prediction]) -> None:
        """Pack the program and send the request; called in the thread that trains."""
        if self._control.ended:
            settle(future, Prediction(knobs, failed=ENDED))
            return
        try:
            self._send(knobs, future)
        except CannotPredictError as error:
            settle(future, Prediction(knobs, failed=str(error)))
        except Exception as error:
            text = f"This step cannot be predicted: {type(error).__name__}: {error}"
            settle(future, Prediction(knobs, failed=text.splitlines()[0]))

    def _send(self, knobs: Knobs, future: Future[Prediction]) -> None:
        now = self._control.setting.knobs
        if self._packed is None:
            if now != Knobs():
                raise CannotPredictError(_TOO_LATE)
            self._packed = self._pack()
        program, assumed, is_cell = self._packed
        if is_cell and any(KNOBS[name].asks_loop_for(value) for name, value in knobs.changed().items()):
            raise CannotPredictError(NO_STEP)
        request = Request(knobs, now, self._control.peak(now), self._machine, process_settings(), assumed)
        self._predictor.submit(program, request, future)

    @functools.cached_property
    def _machine(self) -> Machine:
        virtual = active()
        if virtual is not None:
            return machine_of(virtual.gpu, release=virtual.release, os=virtual.os)
        on_gpu = self._counters.device.startswith("cuda")
        return machine_of(torch.device(self._counters.device) if on_gpu else CPU)
