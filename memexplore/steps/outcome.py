"""The outcome of one setting in numbers: whether it fits, its peaks, its cost.

In: a `Step` and `Knobs`, or a function that runs knobs. Out: an `Outcome` with the `Trial` it was taken from. Where a
setting does not fit, its peaks come from a second run on a virtual GPU with the same numbers and unlimited memory.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from memexplore import capture, targets
from memexplore.allocator import Settings
from memexplore.analysis.curves import curve, peak
from memexplore.analysis.picture import with_whole
from memexplore.analysis.tradeoffs import Point
from memexplore.analysis.verdict import failed_request
from memexplore.gpu_catalogue import Gpu
from memexplore.knobs.knobs import Knobs
from memexplore.knobs.layouts import layout_of
from memexplore.knobs.report import ApplyReport
from memexplore.steps.out_of_memory import fits
from memexplore.steps.step import Step
from memexplore.steps.trial import (
    Trial,
    derived_trial,
    failing_trial,
    is_traced,
    run,
    target_of,
    traced_on_unlimited,
)
from memexplore.tape import Os, Phase, Source, Tape


class Outcome(NamedTuple):
    """The numbers of one setting; sizes in bytes. The peaks are those of the whole run, whether or not it fits."""

    knobs: Knobs
    gpu: str
    """Key of the catalogue entry, the given size, or ``cpu``."""
    capacity: int
    """Memory that the run could use; on the CPU the memory of this machine."""
    fits: bool
    peak_allocated: int
    peak_reserved: int
    flops: int
    """Of one step, on one GPU."""
    seconds: float
    """Of one step: measured on a real device, else by the roofline model (`Cost.seconds`), which is for ratios only.

    On several GPUs the longer of computing and sending, which overlap at best."""
    samples: int
    """Of one step, on one GPU."""
    applied: ApplyReport = ApplyReport()
    source: Source = Source.PREDICTED
    """Whether peaks and seconds were measured; the peaks of what does not fit a real GPU are predicted."""
    constant: int = 0
    """Allocated at the end of backward: weights, gradients and optimizer state, which do not depend on the batch."""
    gpus: int = 1
    batches: int = 1
    """Different batches of `samples` in one step of all GPUs; with tensor parallelism several GPUs share one."""
    sent: int = 0
    """Bytes that one GPU sends to others in one step (kernels/traffic.py)."""
    compute_seconds: float = math.nan
    """Of one step without what it sends, by the roofline model."""
    link_seconds: float = 0.0
    """Of what one GPU sends in one step, at the rate of its link (`gpu_links`)."""

    @property
    def margin(self) -> int:
        """Bytes of the GPU that are left; negative where bytes are missing."""
        return self.capacity - self.peak_reserved


def run_outcome(
    step: Step,
    knobs: Knobs | None = None,
    *,
    gpu: str | Gpu | None = None,
    release: str | None = None,
    os: str = Os.LINUX,
) -> tuple[Trial, Outcome]:
    """Run a step with some knobs, and a second time with unlimited memory if it does not fit.

    `gpu`, `release` and `os` are as in `trial.run`. Default: the real GPU if usable, else a virtual T4.

    >>> import torch
    >>> step = Step(torch.nn.Linear(1024, 1024), torch.zeros(4, 1024), loss=torch.mean)
    >>> trial, outcome = run_outcome(step, gpu="8MiB")
    >>> fits(trial.tape), outcome.fits, outcome.margin < 0
    (False, False, True)

    Raises as `trial.run` does.
    """
    knobs = knobs or Knobs()
    samples = knobs.batch or step.batch_size
    return outcome_of(lambda setting, on: run(step, setting, gpu=on, release=release, os=os), knobs, gpu, samples)


def outcome_of(
    run: Callable[[Knobs, str | Gpu | None], Trial],
    knobs: Knobs,
    gpu: str | Gpu | None,
    samples: int,
    trial: Trial | None = None,
    whole: Trial | None = None,
) -> tuple[Trial, Outcome]:
    """Run knobs by a function of knobs and GPU, and a second time with unlimited memory if they do not fit.

    `gpu` is as in `trial.run`; the GPU with unlimited memory is virtual. `samples` are those of one step. `trial` is
    the trial of the knobs, and `whole` that with unlimited memory, where it was run before. Raises what `run` raises.
    """
    device = targets.gpu_of(target_of(knobs, gpu))
    trial = trial or run(knobs, gpu)
    if fits(trial.tape):
        whole = trial
    else:
        whole = whole or run(knobs.replace(gpu=None), capture.unlimited(device))
        trial = trial._replace(tape=with_whole(trial.tape, whole.tape))
    capacity = device.capacity if trial.tape.meta.capacity is None else trial.tape.meta.capacity
    return trial, _outcome(knobs, device, capacity, samples, whole, fits=fits(trial.tape))


def run_unlimited(
    step: Step,
    knobs: Knobs | None = None,
    *,
    gpu: str | None = None,
    release: str | None = None,
    os: str = Os.LINUX,
) -> tuple[Trial, Outcome]:
    """Run a step with unlimited memory: the outcome of `run_outcome`, with another trial, in half the time.

    The requests of the run are then replayed on an allocator with the capacity of the GPU, to see whether they fit.
    The trial is that with unlimited memory, so it never ends out of memory. On a real device, and where a step reads
    how much memory the GPU has, the result is that of `run_outcome`.

    >>> import torch
    >>> step = Step(torch.nn.Linear(1024, 1024), torch.zeros(4, 1024), loss=torch.mean)
    >>> trial, outcome = run_unlimited(step, gpu="8MiB")
    >>> fits(trial.tape), outcome == run_outcome(step, gpu="8MiB")[1]
    (True, True)

    Raises as `trial.run` does.
    """
    knobs = knobs or Knobs()
    samples = knobs.batch or step.batch_size
    if targets.is_real(target_of(knobs, gpu)):
        return run_outcome(step, knobs, gpu=gpu, release=release, os=os)
    device = targets.gpu_of(target_of(knobs, gpu))
    whole = run(step, knobs.replace(gpu=None), gpu=capture.unlimited(device), release=release, os=os)
    if not is_traced(step, knobs, gpu, release):
        return outcome_of(
            lambda one, on: run(step, one, gpu=on, release=release, os=os), knobs, gpu, samples, None, whole
        )
    settings = capture.settings_of(knobs.settings or "")
    capacity = device.for_release(capture.release_or_installed(release)).capacity
    limit = settings.limit(device.total)
    capacity = capacity if limit is None else min(capacity, limit)
    known = _known_to_fit(whole.tape, capacity)
    trial = derived_trial(step, knobs, gpu, release, os) if known is None else None
    return whole, _outcome(knobs, device, capacity, samples, trial or whole, fits=known or trial is not None)


def _known_to_fit(tape: Tape, capacity: int) -> bool | None:
    """Return whether a run with unlimited memory fits a capacity; None where only an allocator with it can tell."""
    settings = Settings.parse(tape.meta.settings)
    if settings.per_process_memory_fraction < 1 or settings.throw_on_cudamalloc_oom:
        return None  # these compare with all of the memory of the GPU
    if peak(tape, "reserved")[0] <= capacity:
        return True  # no segment is refused, so all blocks are placed alike
    return False if peak(tape, "requested")[0] > capacity else None


def run_drawn(
    step: Step,
    knobs: Knobs | None = None,
    *,
    gpu: str | None = None,
    release: str | None = None,
    os: str = Os.LINUX,
) -> tuple[Trial, Outcome]:
    """Run a step with some knobs for its picture: `run_outcome` in less time for a setting that does not fit.

    There the tape of the trial may end with the failed request, without what Python frees after it: the run was made
    with unlimited memory, and its requests replayed on the capacity of the GPU. The tape's `whole` is that run.

    >>> import torch
    >>> step = Step(torch.nn.Linear(1024, 1024), torch.zeros(4, 1024), loss=torch.mean)
    >>> trial, outcome = run_drawn(step, gpu="24MiB")
    >>> trial, outcome = run_drawn(step, Knobs(batch=4096), gpu="24MiB")
    >>> is_unfinished(trial), outcome == run_outcome(step, Knobs(batch=4096), gpu="24MiB")[1]
    (True, True)

    Raises as `trial.run` does.
    """
    knobs = knobs or Knobs()
    trial = None
    if not targets.is_real(target_of(knobs, gpu)) and traced_on_unlimited(step, knobs, gpu, release, os):
        setting = (step, knobs, gpu, release, os)
        trial = derived_trial(*setting) or failing_trial(*setting)
    samples = knobs.batch or step.batch_size
    return outcome_of(lambda one, on: run(step, one, gpu=on, release=release, os=os), knobs, gpu, samples, trial)


def is_unfinished(trial: Trial) -> bool:
    """Return whether the tape of a trial ends with the failed request, so that what Python frees is not on it."""
    return 0 <= failed_request(trial.tape) == len(trial.tape) - 1


def _outcome(knobs: Knobs, device: Gpu, capacity: int, samples: int, trial: Trial, *, fits: bool) -> Outcome:
    source = trial.tape.meta.source
    computing, sending = trial.cost.seconds(device), trial.cost.link_seconds(device)
    return Outcome(
        knobs=knobs,
        gpu=device.key,
        capacity=capacity,
        fits=fits,
        peak_allocated=peak(trial.tape)[0],
        peak_reserved=peak(trial.tape, "reserved")[0],
        flops=trial.cost.flops,
        seconds=trial.seconds if source is Source.MEASURED else max(computing, sending),
        samples=samples,
        applied=trial.applied,
        source=source,
        constant=_constant(trial.tape),
        gpus=knobs.gpus or 1,
        batches=layout_of(knobs).data_parallel,
        sent=trial.cost.sent,
        compute_seconds=computing,
        link_seconds=sending,
    )


def _constant(tape: Tape) -> int:
    backward = np.flatnonzero((tape.step == tape.step.max(initial=0)) & (tape.phase == Phase.BACKWARD))
    return int(curve(tape)[backward[-1]]) if len(backward) else 0


RunSetting = Callable[..., tuple[Trial, Outcome]]
"""A function that runs a setting of a step: `run_outcome` or `run_unlimited`."""


def slow_down(outcome: Outcome, as_written: Outcome | None) -> float:
    """Return the time of a sample over that as written, 1 for as fast; NaN if either is unknown.

    A measured and a predicted time are not compared: NaN as well.
    """
    if as_written is None or not as_written.seconds or outcome.source is not as_written.source:
        return math.nan
    return _of_sample(outcome, outcome.seconds) / _of_sample(as_written, as_written.seconds)


def extra_flops(outcome: Outcome, as_written: Outcome | None) -> float:
    """Return the share of FLOPs of a sample beyond those as written; NaN if either is unknown."""
    if as_written is None or not as_written.flops:
        return math.nan
    return flops_of_sample(outcome) / flops_of_sample(as_written) - 1


def flops_of_sample(outcome: Outcome) -> float:
    """Return the FLOPs of a sample on all GPUs together."""
    return _of_sample(outcome, outcome.flops * outcome.gpus)


def _of_sample(outcome: Outcome, amount: float) -> float:
    return amount / (outcome.samples * outcome.batches)


def point(outcome: Outcome, as_written: Outcome | None) -> Point:
    """Return the setting as a point of the trade-off chart."""
    return Point(
        str(outcome.knobs),
        slow_down(outcome, as_written),
        extra_flops(outcome, as_written),
        outcome.peak_reserved,
        outcome.fits,
        outcome.source,
    )
