"""Predictions beside a watched run: a setting goes to a process of low priority, what the virtual GPU says comes back.

The virtual GPU patches torch, so it cannot run in the process that trains. One process serves one run; a newer request
replaces an older one, and a process that has been busy with an older one for long is ended.
"""

from __future__ import annotations

import atexit
import contextlib
import math
import multiprocessing
import os
import pickle
import signal
import threading
import time
import weakref
from concurrent.futures import Future
from typing import Any, NamedTuple

import cloudpickle
import torch

from memexplore import targets
from memexplore.analysis.curves import by_category
from memexplore.gpu_catalogue import Gpu
from memexplore.knobs.choices import Optimizer, Update
from memexplore.knobs.knobs import Knobs
from memexplore.live import step_copy
from memexplore.live.code_step import CodeLoss
from memexplore.live.gradient_buckets import Buckets
from memexplore.live.observed import ObservedCall
from memexplore.search import workers
from memexplore.search.beside import end_with_parent
from memexplore.steps import trial
from memexplore.steps.outcome import Outcome, outcome_of, slow_down
from memexplore.steps.step import Step
from memexplore.tape import Category, Os, Tape

_NICENESS = 10
"""Lower priority of the process than that of the run, and of searches."""
_PATIENCE = 3.0
"""Seconds for which a newer request waits for an older one before its process is ended."""
_IDLE = 60.0
"""Seconds without a request after which the process ends."""
REPLACED = "A newer request replaced this one."
ENDED = "The run has ended."


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


class Target(NamedTuple):
    """The device of a prediction."""

    gpu: Gpu
    release: str | None = None
    os: str = Os.LINUX


class Request(NamedTuple):
    """One setting to be predicted; the packed step is sent before."""

    knobs: Knobs
    unchanged: Knobs
    measured_peak: int | None
    call: ObservedCall
    micro_batches: int
    target: Target
    settings: workers.ProcessSettings
    buckets: Buckets | None = None
    """Gradient buckets of DistributedDataParallel."""
    code: bytes = b""
    """The lines of the loop that compute the loss (`step_copy.pack_code`), nothing where they are not known."""


class Predictor:
    """Sends requests of one run to its process. `start` is called in the thread that trains, the others in any."""

    def __init__(self) -> None:
        self._condition = threading.Condition()
        self._waiting: tuple[Request, Future[Prediction]] | None = None
        self._running: Future[Prediction] | None = None
        self._since = 0.0
        self._process: Any = None
        self._closed = False
        _predictors.add(self)

    def start(self, packed: bytes, request: Request, future: Future[Prediction]) -> None:
        """Send a request instead of one that waits, to a new process where none is free soon."""
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
            if self._process is None:
                self._begin_process(packed)
            self._condition.notify()

    def _begin_process(self, packed: bytes) -> None:
        connection, other = multiprocessing.Pipe()
        self._process = process = workers.new_process(_serve, (other,))
        process.start()
        # The end of the process then ends the thread.
        other.close()
        name = "memexplore-prediction"
        threading.Thread(target=self._talk, args=(process, connection, packed), name=name, daemon=True).start()

    def _end_process(self) -> None:
        process, self._process = self._process, None
        running, self._running = self._running, None
        if process is not None:
            process.terminate()
        if running is not None:
            settle(running, Prediction(Knobs(), failed=ENDED if self._closed else REPLACED))

    def _talk(self, process: Any, connection: Any, packed: bytes) -> None:
        """Send requests to a process and settle their futures, until it ends."""
        # Of the connection or of an answer that cannot be read: the request then fails below.
        with contextlib.suppress(Exception):
            connection.send_bytes(packed)
            while True:
                with self._condition:
                    self._condition.wait_for(lambda: self._waiting is not None or self._process is not process, _IDLE)
                    if self._waiting is None or self._process is not process:
                        break
                    (request, future), self._waiting = self._waiting, None
                    self._running, self._since = future, time.monotonic()
                connection.send_bytes(cloudpickle.dumps(request))
                answer = pickle.loads(connection.recv_bytes())
                with self._condition:
                    if self._running is future:
                        self._running = None
                settle(future, answer)
        with self._condition:
            if self._process is process:
                self._process = None
                if self._running is not None:
                    settle(self._running, Prediction(Knobs(), failed="The process of the prediction ended."))
                    self._running = None
        connection.close()
        process.terminate()
        process.join()

    def close(self) -> None:
        """End the process; requests that wait fail. It may be called twice."""
        with self._condition:
            self._closed = True
            if self._waiting is not None:
                settle(self._waiting[1], Prediction(self._waiting[0].knobs, failed=ENDED))
                self._waiting = None
            self._end_process()
            self._condition.notify()


_predictors: weakref.WeakSet[Predictor] = weakref.WeakSet()


@atexit.register
def _close_all() -> None:
    # Python waits at its exit for processes that are no daemons.
    for predictor in list(_predictors):
        predictor.close()


def settle(future: Future[Prediction], prediction: Prediction) -> None:
    """Set the result of a future that has none yet."""
    if not future.done():
        future.set_result(prediction)


# --- in the process -------------------------------------------------------------------------------------------------


def _serve(connection: Any) -> None:
    # An interrupt of a notebook reaches the whole process group; the parent ends the process itself.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    # No context on the GPU that trains: nothing here uses a real one.
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    threading.Thread(target=end_with_parent, daemon=True).start()
    if hasattr(os, "nice"):
        os.nice(_NICENESS)
    torch.set_num_threads(1)
    with contextlib.suppress(EOFError, OSError):
        packed: Any = connection.recv_bytes()
        while True:
            request: Request = pickle.loads(connection.recv_bytes())
            try:
                workers.set_process_settings(request.settings)
                if isinstance(packed, bytes):
                    packed = pickle.loads(packed)
                answer = predicted(packed, request)
            except Exception as error:
                text = f"This step cannot be predicted: {type(error).__name__}: {error}"
                answer = Prediction(request.knobs, failed=text.splitlines()[0])
            connection.send_bytes(cloudpickle.dumps(answer))


def predicted(packed: Step, request: Request) -> Prediction:
    """Return the prediction of a request for an unpacked model. Raises what the step raises."""
    outcome, assumed = _outcome(packed, request, request.knobs)
    unchanged = outcome if request.unchanged == request.knobs else _outcome(packed, request, request.unchanged)[0]
    on_cpu = request.target.gpu.key == targets.CPU
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
    gpu, release, os_of_driver = request.target
    knobs = knobs.replace(accumulation=None)
    if gpu.key == targets.CPU and _updates_by_default(step, knobs):
        # On a CPU that is one weight after the other.
        knobs = knobs.replace(update=Update.PER_TENSOR)

    def run(setting: Knobs, on: str | Gpu | None) -> trial.Trial:
        return trial.run(step, setting, gpu=on, release=release, os=os_of_driver)

    try:
        done, outcome = outcome_of(run, knobs, gpu, step.batch_size)
    finally:
        if isinstance(step.compute_loss, step_copy.Replay):
            step.compute_loss.end()
    if gpu.key == targets.CPU:
        outcome = outcome._replace(peak_allocated=_peak_of_cpu(done.tape))
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
