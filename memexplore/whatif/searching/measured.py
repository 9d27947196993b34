"""What one setting needs and costs, in numbers; where it does not fit, on the same GPU with memory without end."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from memexplore import devices
from memexplore.curves import peak
from memexplore.devices import Gpu
from memexplore.tape import Action, Tape
from memexplore.tradeoffs import Point
from memexplore.whatif.apply import Applied
from memexplore.whatif.knobs import Knobs
from memexplore.whatif.step import Step
from memexplore.whatif.trial import Trial, run

ENDLESS = 1 << 50
"""Bytes of a GPU on which every step fits: a PiB."""


class Measured(NamedTuple):
    """The numbers of one setting; sizes in bytes. The peaks are what the whole run needs, whether or not it fits."""

    knobs: Knobs
    gpu: str
    """Key of the catalogue entry, or the size asked for."""
    capacity: int
    fits: bool
    peak_allocated: int
    peak_reserved: int
    flops: int
    seconds: float
    """By the roofline model (`Cost.seconds`): good for ratios only."""
    samples: int
    """Of a step."""
    applied: Applied = Applied()

    @property
    def margin(self) -> int:
        """Bytes of the GPU that are left; below 0, how many are missing."""
        return self.capacity - self.peak_reserved


def fits(tape: Tape) -> bool:
    """Whether a run came to its end."""
    return not bool(np.any(tape.action == Action.OOM))


def measure(
    step: Step, knobs: Knobs | None = None, *, gpu: str = "T4", release: str | None = None
) -> tuple[Trial, Measured]:
    """Run a step with some knobs, and once more with memory without end where it does not fit.

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
    run: Callable[[Knobs, str | Gpu], Trial], knobs: Knobs, gpu: str, samples: int, known: Trial | None = None
) -> tuple[Trial, Measured]:
    """Run some knobs with a function of knobs and GPU, and once more with memory without end where they do not fit.

    `samples` are those of a step, `known` is the trial of the knobs where it was run before. Raises what `run` raises.
    """
    device = devices.find(knobs.gpu or gpu)
    trial = whole = known or run(knobs, gpu)
    if not fits(trial.tape):
        whole = run(knobs.replace(gpu=None), dataclasses.replace(device, total=ENDLESS))
    return trial, Measured(
        knobs=knobs,
        gpu=device.key,
        capacity=device.capacity,
        fits=fits(trial.tape),
        peak_allocated=peak(whole.tape)[0],
        peak_reserved=peak(whole.tape, "reserved")[0],
        flops=whole.cost.flops,
        seconds=whole.cost.seconds(device),
        samples=samples,
        applied=whole.applied,
    )


def slow_down(measured: Measured, as_written: Measured | None) -> float:
    """Expected time of a sample over that as written, 1 for as fast; not a number where either is not known."""
    if as_written is None or not as_written.seconds:
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
    )
