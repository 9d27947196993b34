"""Predictions beside a watched run: a setting goes to a process of low priority, what the virtual GPU says comes back.

The virtual GPU patches torch, so it cannot run in the process that trains. One process serves one run; a newer request
replaces an older one, and a process that has been busy with an older one for long is ended.
"""

from __future__ import annotations

import contextlib
import math
import os
import pickle
import threading
import time
from collections.abc import Generator
from concurrent.futures import Future
from typing import Any, NamedTuple

import cloudpickle
import torch

from memexplore.analysis.curves import by_category
from memexplore.live import step_copy
from memexplore.live.code_step import CodeLoss
from memexplore.live.gradient_buckets import Buckets
from memexplore.live.observed import ObservedCall
from memexplore.run.knobs.knobs import Knobs
from memexplore.run.knobs.optimizer import Optimizer
from memexplore.run.knobs.update import Update
from memexplore.run.machine import Kind, Machine
from memexplore.run.programs.outcome import Outcome, slow_down
from memexplore.run.programs.packing import unpacked
from memexplore.run.programs.step import Step
from memexplore.run.run import run
from memexplore.run.search.process_settings import ProcessSettings, set_process_settings
from memexplore.run.search.workers import Workers
from memexplore.tape import Category, Tape

_NICENESS = 10
"""Added to the niceness of the process: the run and searches come first."""
_PATIENCE = 3.0
"""Seconds for which a newer request waits for an older one before its process is ended."""
_IDLE = 60.0
"""Seconds without a request after which the process ends."""
REPLACED = "A newer request replaced this one."
ENDED = "The run has ended."
_PROCESS_ENDED = "The process of the prediction ended."


class Prediction(NamedTuple):
    """What the virtual GPU predicts for a setting of the step that runs; sizes in bytes, None where it failed."""

    knobs: Knobs
    peak_allocated: int | None = None
    peak_reserved: int | None = None
    capacity: int | None = None
    """Bytes that the allocator can reserve, None on the CPU."""
    fits: bool | None = None
    time_ratio: float = math.nan
    """Time of a sample over that with the unchanged setting, by the roofline model; NaN where it is not known."""
    unchanged: Knobs = Knobs()
    """The setting in effect when the prediction was requested."""
    unchanged_peak: int | None = None
    """Predicted peak allocated of a step with the unchanged setting."""
    measured_peak: int | None = None
    """Measured peak allocated of such a step, the last one with these inputs."""
    assumed: tuple[str, ...] = ()
    """What was not known of the step, as sentences."""
    failed: str = ""
    """Why there is no prediction, as a sentence."""


class Request(NamedTuple):
    """One setting to be predicted; the packed step is sent before."""

    knobs: Knobs
    unchanged: Knobs
    measured_peak: int | None
    call: ObservedCall
    micro_batches: int
    machine: Machine
    settings: ProcessSettings
    buckets: Buckets | None = None
    """Gradient buckets of DistributedDataParallel."""
    code: bytes = b""
    """The lines of the loop that compute the loss (`step_copy.pack_code`), nothing where they are not known."""


class Predictor:
    """Sends requests of one run to its process. The thread that trains calls `submit`, any thread the other methods."""

    def __init__(self) -> None:
        self._condition = threading.Condition()
        self._waiting: tuple[Request, Future[Prediction]] | None = None
        self._running: Future[Prediction] | None = None
        self._since = 0.0
        self._workers: Workers | None = None
        """The process, None while there is none."""
        self._closed = False

    def submit(self, packed: bytes, request: Request, future: Future[Prediction]) -> None:
        """Send a request in place of a waiting one, to a new process where no process is free soon."""
        with self._condition:
            if self._closed:
                settle(future, Prediction(request.knobs, failed=ENDED))
                return
            if self._waiting is not None:
                settle(self._waiting[1], Prediction(self._waiting[0].knobs, failed=REPLACED))
            self._waiting = request, future
            busy = self._running is not None and time.monotonic() - self._since > _PATIENCE
            if busy:
                self._end_process()
            if self._workers is None:
                self._begin_process(packed, request.settings)
            self._condition.notify()

    def _begin_process(self, packed: bytes, settings: ProcessSettings) -> None:
        self._workers = workers = Workers(_answer)
        workers.start(niceness=_NICENESS, before=_hide_gpus)
        workers.give(packed, settings)
        threading.Thread(target=self._talk, args=(workers,), name="memexplore-prediction", daemon=True).start()

    def _end_process(self) -> None:
        workers, self._workers = self._workers, None
        running, self._running = self._running, None
        if workers is not None:
            workers.stop()
        if running is not None:
            settle(running, Prediction(Knobs(), failed=ENDED if self._closed else REPLACED))

    def _talk(self, workers: Workers) -> None:
        """Send requests to a process and settle their futures, until it ends."""
        (worker,) = workers.all
        # Of the connection or of an answer that cannot be read: the request then fails below.
        with contextlib.suppress(Exception):
            worker.wait_until_ready()
            while True:
                with self._condition:
                    self._condition.wait_for(lambda: self._waiting is not None or self._workers is not workers, _IDLE)
                    if self._waiting is None or self._workers is not workers:
                        break
                    (request, future), self._waiting = self._waiting, None
                    self._running, self._since = future, time.monotonic()
                worker.send(request)
                answer = worker.receive()
                with self._condition:
                    if self._running is future:
                        self._running = None
                settle(future, answer)
        with self._condition:
            if self._workers is workers:
                self._workers = None
                waiting = None if self._waiting is None else self._waiting[1]
                for future in filter(None, (self._running, waiting)):
                    settle(future, Prediction(Knobs(), failed=_PROCESS_ENDED))
                self._running = self._waiting = None
        workers.stop()
        workers.join()
        workers.close()

    def close(self) -> None:
        """End the process; requests that wait fail. It may be called twice."""
        with self._condition:
            self._closed = True
            if self._waiting is not None:
                settle(self._waiting[1], Prediction(self._waiting[0].knobs, failed=ENDED))
                self._waiting = None
            self._end_process()
            self._condition.notify()


def settle(future: Future[Prediction], prediction: Prediction) -> None:
    """Set the result of a future that has none yet."""
    if not future.done():
        future.set_result(prediction)


# --- in the process -------------------------------------------------------------------------------------------------


def _hide_gpus() -> None:
    # No context on the GPU that trains: nothing here uses a real one.
    os.environ["CUDA_VISIBLE_DEVICES"] = ""


def _answer(packed: bytes, request: Request) -> Generator[Prediction, None, None]:
    try:
        set_process_settings(request.settings)
        yield predicted(unpacked(packed), request)
    except Exception as error:
        text = f"This step cannot be predicted: {type(error).__name__}: {error}"
        yield Prediction(request.knobs, failed=text.splitlines()[0])


def predicted(packed: Step, request: Request) -> Prediction:
    """Return the prediction of a request for an unpacked model. Raises what the step raises."""
    outcome, assumed = _outcome(packed, request, request.knobs)
    unchanged = outcome if request.unchanged == request.knobs else _outcome(packed, request, request.unchanged)[0]
    on_cpu = request.machine.kind is Kind.CPU
    return Prediction(
        request.knobs,
        outcome.peak_allocated,
        outcome.peak_reserved,
        None if on_cpu else outcome.capacity,
        outcome.fits,
        slow_down(outcome, unchanged),
        request.unchanged,
        unchanged.peak_allocated,
        request.measured_peak,
        assumed,
    )


_outcomes: dict[tuple[Any, ...], tuple[Outcome, tuple[str, ...]]] = {}
_MOST_OUTCOMES = 64


def _outcome(packed: Step, request: Request, knobs: Knobs) -> tuple[Outcome, tuple[str, ...]]:
    key = (
        knobs,
        cloudpickle.dumps(request._replace(knobs=knobs, unchanged=knobs, measured_peak=None)),
    )
    if key not in _outcomes:
        if len(_outcomes) >= _MOST_OUTCOMES:
            del _outcomes[next(iter(_outcomes))]
        _outcomes[key] = _run(packed, request, knobs)
    return _outcomes[key]


def _run(packed: Step, request: Request, knobs: Knobs) -> tuple[Outcome, tuple[str, ...]]:
    if not request.code:
        return _run_code(packed, request, knobs, None)
    try:
        return _run_code(packed, request, knobs, pickle.loads(request.code))
    except Exception as error:
        # Lines may need more of the program than their values. An error of the setting is raised again.
        outcome, assumed = _run_code(packed, request, knobs, None)
        reason = f"{type(error).__name__}: {error}".splitlines()[0]
        return outcome, (step_copy.LINES_FAILED.format(reason), *assumed)


def _run_code(packed: Step, request: Request, knobs: Knobs, code: CodeLoss | None) -> tuple[Outcome, tuple[str, ...]]:
    step, assumed = step_copy.step_of(packed, request.call, request.micro_batches, knobs, request.buckets, code)
    machine, knobs = request.machine, knobs.replace(accumulation=None)
    on_cpu = machine.kind is Kind.CPU
    if on_cpu and _updates_by_default(step, knobs):
        # On a CPU that is one weight after the other.
        knobs = knobs.replace(update=Update.PER_TENSOR)

    try:
        result = run(step, knobs, machine.twin())
    finally:
        if isinstance(step.compute_loss, step_copy.Replay):
            step.compute_loss.end()
    outcome = result.outcome
    if on_cpu:
        outcome = outcome._replace(peak_allocated=_peak_of_cpu(result.tape))
    return outcome, (*assumed, *step_copy.assumed_in(step))


def _updates_by_default(step: Step, knobs: Knobs) -> bool:
    """Return whether torch chooses the implementation of the optimizer's update."""
    if knobs.update is not Update.AS_WRITTEN or knobs.optimizer is not Optimizer.AS_WRITTEN:
        return False
    groups = step.optimizer.param_groups if isinstance(step.optimizer, torch.optim.Optimizer) else []
    return bool(groups) and all(group.get("foreach") is None and not group.get("fused") for group in groups)


def _peak_of_cpu(tape: Tape) -> int:
    """Return the peak of what the program requested: the CPU rounds no sizes and has no workspaces."""
    curves = by_category(tape, "requested")
    return int((curves.sum(axis=0) - curves[Category.WORKSPACE]).max(initial=0))
