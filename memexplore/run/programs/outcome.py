"""The numbers of a run, without its tape: whether it fits, its peaks, its cost; and ratios of two of them."""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np

from memexplore.analysis.curves import curve, peak
from memexplore.analysis.need import need_on
from memexplore.analysis.tradeoffs import Point
from memexplore.hardware.catalogue import Gpu
from memexplore.run.knobs.applying.report import ApplyReport
from memexplore.run.knobs.gpus import layout_of
from memexplore.run.knobs.knobs import Knobs
from memexplore.run.programs.execution import Execution
from memexplore.tape import Phase, Source, Tape


class Outcome(NamedTuple):
    """The numbers of one setting; sizes in bytes. They are of the whole run, whether or not it fits."""

    knobs: Knobs
    gpu: str
    """Key of the catalogue entry, the given size, or ``cpu``."""
    capacity: int
    """Memory that the run could use; on the CPU the memory of this machine."""
    fits: bool
    peak_allocated: int
    peak_reserved: int
    """Where there is room for everything; of a real device as measured."""
    needed: int
    """The smallest capacity with which the run goes through, as the allocator gives cached memory back before it fails.
    More than `capacity` if and only if the run does not fit."""
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
        return self.capacity - self.needed


def outcome_of(execution: Execution, gpu: Gpu, capacity: int, fits: bool) -> Outcome:
    """Return the numbers of an execution of the whole program, on a GPU of some capacity that it fits or not."""
    knobs, source = execution.knobs, execution.tape.meta.source
    required = need_on(execution.tape, capacity, fits=fits)
    is_measured = source is Source.MEASURED
    computing, sending = execution.cost.seconds(gpu), execution.cost.link_seconds(gpu)
    return Outcome(
        knobs=knobs,
        gpu=gpu.key,
        capacity=capacity,
        fits=fits,
        peak_allocated=peak(execution.tape)[0],
        peak_reserved=peak(execution.tape, "reserved")[0] if is_measured else required.without_pressure,
        needed=required.smallest,
        flops=execution.cost.flops,
        seconds=execution.seconds if is_measured else max(computing, sending),
        samples=execution.samples,
        applied=execution.applied,
        source=source,
        constant=_constant(execution.tape),
        gpus=knobs.gpus or 1,
        batches=layout_of(knobs).data_parallel,
        sent=execution.cost.sent,
        compute_seconds=computing,
        link_seconds=sending,
    )


def _constant(tape: Tape) -> int:
    backward = np.flatnonzero((tape.step == tape.step.max(initial=0)) & (tape.phase == Phase.BACKWARD))
    return int(curve(tape)[backward[-1]]) if len(backward) else 0


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
        outcome.needed,
        outcome.fits,
        outcome.source,
    )
