"""Predictions beside a watched run: a setting goes to a process of low priority, what the virtual GPU says comes back.

The virtual GPU patches torch, so it cannot run in the process that trains. One process serves one run; a newer request
replaces an older one, and a process that has been busy with an older one for long is ended.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
import os
import threading
import time
from collections.abc import Generator, Iterator
from concurrent.futures import Future
from typing import Any, NamedTuple

import torch

from memexplore.analysis.curves import by_category
from memexplore.analysis.error_range import need_range
from memexplore.live.parts import parts_of
from memexplore.run.knobs.knobs import Knobs
from memexplore.run.knobs.optimizer import Optimizer
from memexplore.run.knobs.update import Update
from memexplore.run.machine import Kind, Machine
from memexplore.run.programs.outcome import Outcome, slow_down
from memexplore.run.programs.packing import unpacked
from memexplore.run.programs.step import Step
from memexplore.run.run import Program, run
from memexplore.run.search.process_settings import ProcessSettings, set_process_settings
from memexplore.run.search.workers import Workers
from memexplore.tape import Category, Tape
from memexplore.text.units import size_text

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
    """What the virtual GPU predicts for a setting of a watched run; sizes in bytes, None where it failed."""

    knobs: Knobs
    peak_allocated: int | None = None
    peak_reserved: int | None = None
    capacity: int | None = None
    """Bytes that the allocator can reserve, None on the CPU."""
    needed: int | None = None
    """The smallest capacity with which the step goes through, with the largest known error of estimated workspaces."""
    fits: bool | None = None
    time_ratio: float = math.nan
    """Time of a sample over that with the unchanged setting, by the roofline model; NaN where it is not known."""
    unchanged: Knobs = Knobs()
    """The setting in effect when the prediction was requested."""
    unchanged_peak: int | None = None
    """Predicted peak allocated of a step with the unchanged setting."""
    measured_peak: int | None = None
    """The highest measured peak allocated of such a step."""
    assumed: tuple[str, ...] = ()
    """What was not known of the program that was run, as sentences."""
    failed: str = ""
    """Why there is no prediction, as a sentence."""

    def refusal(self) -> str:
        """Return why a run that goes on must not have the setting, as a sentence; "" if it fits.

        Where steps of the run have measured more than is predicted for them, the setting needs more by the same factor.

        >>> Prediction(Knobs(), capacity=1024, needed=1000, unchanged_peak=500, measured_peak=600).refusal()
        'It needs 1.17 KiB and the GPU has 1.00 KiB: 176 B are missing.'
        """
        if self.capacity is None or self.needed is None:
            return ""
        share = (self.measured_peak or 0) / self.unchanged_peak if self.unchanged_peak else 1.0
        needed = math.ceil(self.needed * max(share, 1.0))
        if needed <= self.capacity:
            return ""
        sizes = (size_text(size) for size in (needed, self.capacity, needed - self.capacity))
        return "It needs {} and the GPU has {}: {} are missing.".format(*sizes)


class Request(NamedTuple):
    """One setting to be predicted; the packed program is sent before."""

    knobs: Knobs
    unchanged: Knobs
    measured_peak: int | None
    machine: Machine
    settings: ProcessSettings
    assumed: tuple[str, ...] = ()
    """What is not known of the program, as sentences."""


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


def predicted(program: Program, request: Request) -> Prediction:
    """Return the prediction of a request for a program. Raises what the program raises."""
    outcome = _outcome(program, request, request.knobs)
    unchanged = outcome if request.unchanged == request.knobs else _outcome(program, request, request.unchanged)
    on_cpu = request.machine.kind is Kind.CPU
    return Prediction(
        request.knobs,
        outcome.peak_allocated,
        outcome.peak_reserved,
        None if on_cpu else outcome.capacity,
        outcome.needed,
        outcome.fits,
        slow_down(outcome, unchanged),
        request.unchanged,
        unchanged.peak_allocated,
        request.measured_peak,
        request.assumed,
    )


_outcomes: dict[tuple[Program, Knobs, Machine, ProcessSettings], Outcome] = {}
_MOST_OUTCOMES = 64


def _outcome(program: Program, request: Request, knobs: Knobs) -> Outcome:
    key = program, knobs, request.machine, request.settings
    if key not in _outcomes:
        if len(_outcomes) >= _MOST_OUTCOMES:
            del _outcomes[next(iter(_outcomes))]
        _outcomes[key] = _run(program, knobs, request.machine)
    return _outcomes[key]


def _run(program: Program, knobs: Knobs, machine: Machine) -> Outcome:
    if isinstance(program, Step) and knobs.accumulation is not None:
        program, knobs = _in_parts(program, knobs.accumulation), knobs.replace(accumulation=None)
    on_cpu = machine.kind is Kind.CPU
    if on_cpu and _updates_by_default(program, knobs):
        # On a CPU that is one weight after the other.
        knobs = knobs.replace(update=Update.PER_TENSOR)
    result = run(program, knobs, machine.twin())
    if on_cpu:
        return result.outcome._replace(peak_allocated=_peak_of_cpu(result.tape))
    whole = result.tape if result.tape.whole is None else result.tape.whole
    return result.outcome._replace(needed=need_range(whole, result.outcome.needed).high)


def _in_parts(step: Step, count: int) -> Step:
    """Return a step in micro-batches as `InLoop.micro_batches` makes them, of a batch that is on the device."""

    def losses(model: Any, batch: Any) -> Iterator[torch.Tensor]:
        for part, share in parts_of(batch, count):
            loss = step.loss_of(model, part)
            yield from (each * share for each in ((loss,) if isinstance(loss, torch.Tensor) else loss))

    return dataclasses.replace(step, loss=None, compute_loss=losses)


def _updates_by_default(program: Program, knobs: Knobs) -> bool:
    """Return whether torch chooses the implementation of the optimizer's update."""
    if knobs.update is not Update.AS_WRITTEN or knobs.optimizer is not Optimizer.AS_WRITTEN:
        return False
    optimizer = program.optimizer if isinstance(program, Step) else None
    groups = optimizer.param_groups if isinstance(optimizer, torch.optim.Optimizer) else []
    is_class = isinstance(optimizer, type) and issubclass(optimizer, torch.optim.Optimizer)
    by_default = bool(groups) and all(group.get("foreach") is None and not group.get("fused") for group in groups)
    return is_class or by_default


def _peak_of_cpu(tape: Tape) -> int:
    """Return the peak of what the program requested: the CPU rounds no sizes and has no workspaces."""
    curves = by_category(tape, "requested")
    return int((curves.sum(axis=0) - curves[Category.WORKSPACE]).max(initial=0))
