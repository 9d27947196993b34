"""What one setting needs and costs, in numbers; where it does not fit, on the same GPU with memory without end."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from memexplore import targets
from memexplore.analysis.curves import curve, peak
from memexplore.analysis.tradeoffs import Point
from memexplore.capture import release_or_installed
from memexplore.gpu_catalogue import Gpu
from memexplore.knobs.apply import Applied
from memexplore.knobs.knobs import Knobs
from memexplore.steps.step import Step
from memexplore.steps.trial import Trial, place_of, placed, run, was_seen
from memexplore.tape import Action, Phase, Source, Tape

ENDLESS = 1 << 50
"""Bytes of a GPU on which every step fits: a PiB."""


class Measured(NamedTuple):
    """The numbers of one setting; sizes in bytes. The peaks are what the whole run needs, whether or not it fits."""

    knobs: Knobs
    gpu: str
    """Key of the catalogue entry, the size asked for, or ``cpu``."""
    capacity: int
    """What the run could have had; on the CPU the memory of this machine."""
    fits: bool
    peak_allocated: int
    peak_reserved: int
    flops: int
    seconds: float
    """Of one step: taken on a real device, else by the roofline model (`Cost.seconds`), which is good for ratios only.
    """
    samples: int
    """Of a step."""
    applied: Applied = Applied()
    source: Source = Source.PREDICTED
    """Whether peaks and seconds were measured; what does not fit a real GPU needs what a virtual one predicts."""
    constant: int = 0
    """Allocated when backward is done: weights, gradients and optimizer state, which are there whatever the batch."""

    @property
    def margin(self) -> int:
        """Bytes of the GPU that are left; below 0, how many are missing."""
        return self.capacity - self.peak_reserved


def fits(tape: Tape) -> bool:
    """Whether a run came to its end."""
    return not bool(np.any(tape.action == Action.OOM))


def measure(
    step: Step, knobs: Knobs | None = None, *, gpu: str | None = None, release: str | None = None
) -> tuple[Trial, Measured]:
    """Run a step with some knobs, and once more on a virtual GPU with memory without end where it does not fit.

    >>> import torch
    >>> step = Step(torch.nn.Linear(1024, 1024), torch.zeros(4, 1024), loss=torch.mean)
    >>> trial, measured = measure(step, gpu="8MiB")
    >>> fits(trial.tape), measured.fits, measured.margin < 0
    (False, False, True)

    Raises what `run` raises.
    """
    knobs = knobs or Knobs()
    samples = knobs.batch or step.batch_size
    return measured_by(lambda turned, on: run(step, turned, gpu=on, release=release), knobs, gpu, samples)


def measured_by(
    run: Callable[[Knobs, str | Gpu | None], Trial],
    knobs: Knobs,
    gpu: str | None,
    samples: int,
    known: Trial | None = None,
) -> tuple[Trial, Measured]:
    """Run some knobs with a function of knobs and GPU, and once more with memory without end where they do not fit.

    The GPU is a place as `trial.run` has it; that with memory without end is virtual.

    `samples` are those of a step, `known` is the trial of the knobs where it was run before. Raises what `run` raises.
    """
    device = targets.find(place_of(knobs, gpu))
    trial = whole = known or run(knobs, gpu)
    if not fits(trial.tape):
        whole = run(knobs.replace(gpu=None), dataclasses.replace(device, total=ENDLESS))
    capacity = device.capacity if trial.tape.meta.capacity is None else trial.tape.meta.capacity
    return trial, _measured(knobs, device, capacity, samples, whole, fits=fits(trial.tape))


def needs(
    step: Step, knobs: Knobs | None = None, *, gpu: str | None = None, release: str | None = None
) -> tuple[Trial, Measured]:
    """The numbers of `measure` in half the time where a setting does not fit a virtual GPU; the trial is another.

    The setting is run with memory without end, and its requests are then asked again with the memory there is. The
    trial is that with memory without end: it never ends out of memory.

    >>> import torch
    >>> step = Step(torch.nn.Linear(1024, 1024), torch.zeros(4, 1024), loss=torch.mean)
    >>> trial, measured = needs(step, gpu="8MiB")
    >>> fits(trial.tape), measured == measure(step, gpu="8MiB")[1]
    (True, True)

    Raises what `run` raises.
    """
    knobs = knobs or Knobs()
    samples = knobs.batch or step.batch_size
    if targets.is_real(place_of(knobs, gpu)):
        return measure(step, knobs, gpu=gpu, release=release)
    device = targets.find(place_of(knobs, gpu))
    whole = run(step, knobs.replace(gpu=None), gpu=dataclasses.replace(device, total=ENDLESS), release=release)
    if not was_seen(step, knobs, gpu, release):
        # Where a step looks at how much memory there is, only a run tells what it does.
        return measure(step, knobs, gpu=gpu, release=release)
    capacity = device.under(release_or_installed(release)).capacity
    trial = placed(step, knobs, gpu, release)
    return whole, _measured(knobs, device, capacity, samples, trial or whole, fits=trial is not None)


def _measured(knobs: Knobs, device: Gpu, capacity: int, samples: int, trial: Trial, *, fits: bool) -> Measured:
    source = trial.tape.meta.source
    return Measured(
        knobs=knobs,
        gpu=device.key,
        capacity=capacity,
        fits=fits,
        peak_allocated=peak(trial.tape)[0],
        peak_reserved=peak(trial.tape, "reserved")[0],
        flops=trial.cost.flops,
        seconds=trial.seconds if source is Source.MEASURED else trial.cost.seconds(device),
        samples=samples,
        applied=trial.applied,
        source=source,
        constant=_constant(trial.tape),
    )


def _constant(tape: Tape) -> int:
    backward = np.flatnonzero((tape.step == tape.step.max(initial=0)) & (tape.phase == Phase.BACKWARD))
    return int(curve(tape)[backward[-1]]) if len(backward) else 0


Measure = Callable[..., tuple[Trial, Measured]]
"""How a setting is run: `measure`, or `needs`."""


def slow_down(measured: Measured, as_written: Measured | None) -> float:
    """Time of a sample over that as written, 1 for as fast; not a number where either is not known.

    Measured and predicted times do not compare.
    """
    if as_written is None or not as_written.seconds or measured.source is not as_written.source:
        return math.nan
    return (measured.seconds / measured.samples) / (as_written.seconds / as_written.samples)


def extra_flops(measured: Measured, as_written: Measured | None) -> float:
    """Share of FLOPs beyond those as written, for a sample; not a number where either is not known."""
    if as_written is None or not as_written.flops:
        return math.nan
    return (measured.flops / measured.samples) / (as_written.flops / as_written.samples) - 1


def point(measured: Measured, as_written: Measured | None) -> Point:
    """The setting in the trade-off chart."""
    return Point(
        str(measured.knobs),
        slow_down(measured, as_written),
        extra_flops(measured, as_written),
        measured.peak_reserved,
        measured.fits,
        measured.source,
    )
