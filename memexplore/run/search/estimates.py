"""Estimates of what a setting needs before it is run: which settings to run first, and which cannot fit.

In: the tape of a setting that was run with unlimited memory. Out: its `Need`, the `SearchPoint` of a setting that was
not run, and whether a knob cannot make a setting fit. Estimates order a search and are never shown as results.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from memexplore.analysis.curves import by_category, curve
from memexplore.run.knobs.knob import Estimate, Untouched
from memexplore.run.knobs.knobs import KNOBS, Knobs
from memexplore.tape import Category, Phase, Tape


class Need(NamedTuple):
    """The bytes of a run by what they depend on."""

    weights: int
    """Weights and buffers at the end of backward."""
    gradients: int
    states: int
    """Optimizer state."""
    activations: int
    """The most bytes of all else in forward and backward."""
    fixed: int
    """Bytes that saving activations leaves: weights, gradients, optimizer state, and temporaries of the update."""
    peak: int
    """Peak allocated in forward and backward."""

    @property
    def constant(self) -> int:
        """Bytes that do not depend on the batch."""
        return self.weights + self.gradients + self.states


_CONSTANT = (
    Category.PARAMETER,
    Category.BUFFER,
    Category.GRADIENT,
    Category.OPTIMIZER_STATE,
    Category.GATHERED_PARAMETER,
    Category.GRADIENT_BUCKET,
)


def need_of(tape: Tape) -> Need:
    """Return the bytes of a run of two steps by what they depend on; a tape without backward has activations only."""
    allocated = curve(tape)
    in_update = tape.phase == Phase.OPTIMIZER
    peak = int(allocated[~in_update].max(initial=0))
    last = tape.step == tape.step.max(initial=0)
    backward = np.flatnonzero(last & (tape.phase == Phase.BACKWARD))
    if not len(backward):
        return Need(0, 0, 0, peak, 0, peak)
    bytes_of = by_category(tape)
    others = allocated - bytes_of[list(_CONSTANT)].sum(axis=0)
    activations = int(others[~in_update].max(initial=0))
    end = int(backward[-1])
    weights = int(bytes_of[Category.PARAMETER, end] + bytes_of[Category.BUFFER, end])
    gradients = int(bytes_of[Category.GRADIENT, end] + bytes_of[Category.GRADIENT_BUCKET, end])
    states = int(bytes_of[Category.OPTIMIZER_STATE, end])
    fixed = weights + gradients + states
    update = np.flatnonzero(last & in_update)
    # An update in the backward pass has activations beside it, so its peak is no lower bound.
    if len(update) and update[0] > end:
        fixed = max(fixed, int(allocated[update].max() - others[end]))
    return Need(weights, gradients, states, activations, fixed, peak)


class SearchPoint(NamedTuple):
    """A setting that was run or estimated: time of a sample (1 as written), bytes needed, whether it fits."""

    time: float
    needed: int
    fits: bool
    constant: int = 0
    """Bytes of weights, gradients and optimizer state, which do not depend on the batch."""
    gradients: int = 0
    fixed: int = 0
    """`Need.fixed`."""
    peak: int = 0
    """Peak allocated in forward and backward, 0 if unknown."""
    other: int | None = None
    """`Need.activations`; None for all that is needed beyond the constant bytes."""
    states: int = 0
    """Bytes of optimizer state."""

    @property
    def weights(self) -> int:
        """Bytes of weights and buffers."""
        return self.constant - self.gradients - self.states

    @property
    def of_update(self) -> int:
        """The most bytes of temporaries of the update."""
        return max(self.fixed - self.constant, 0)

    @property
    def activations(self) -> int:
        """The most bytes of activations, temporaries and inputs in forward and backward."""
        return max(self.needed - self.constant, 0) if self.other is None else self.other

    @property
    def allocated(self) -> float:
        """About the peak allocated: of forward and backward without gradients, of all gradients, or of the update."""
        return max(self.constant, self.constant - self.gradients + self.activations, self.fixed)


def estimated(one: Knobs, need: Need, written: SearchPoint, input_size: int | None) -> SearchPoint:
    """Return the estimate of a setting of one knob from the need of the step as written.

    `written` is its point, `input_size` its input size. The estimate of a knob that it does not know is as written.

    >>> need = Need(weights=10, gradients=10, states=20, activations=60, fixed=50, peak=90)
    >>> written = SearchPoint(1.0, 90, False, need.constant, need.gradients, need.fixed, need.peak, need.activations)
    >>> estimated(Knobs(accumulation=2), need, written, None).needed  # 40 - 10 + 60 / 2
    60
    >>> estimated(Knobs(update="fused"), need, written, None).fixed  # without temporaries of the update
    40
    """
    estimate = Estimate(
        need.weights, need.gradients, need.states, float(need.activations), need.constant, need.fixed, input_size
    )
    for name, value in one.changed().items():
        KNOBS[name].estimate(value, estimate)
    point = SearchPoint(
        estimate.time,
        0,
        False,
        estimate.constant,
        estimate.gradients,
        estimate.fixed,
        other=int(estimate.activations),
        states=estimate.states,
    )
    return point._replace(needed=int(point.allocated * overhead(written)))


def overhead(point: SearchPoint) -> float:
    """Return the bytes that a setting needs over the bytes that it allocates by its parts: fragmentation, mostly.

    >>> overhead(SearchPoint(1.0, 110, False, constant=40, fixed=60, other=60))
    1.1
    """
    return point.needed / max(point.allocated, 1)


def combined(base: SearchPoint, single: SearchPoint, written: SearchPoint) -> SearchPoint:
    """Return the estimate of a setting with one more knob changed, from the ratios of that knob by itself.

    Weights, gradients, optimizer state and temporaries of the update have ratios of their own: where LoRA leaves few
    gradients, no knob saves more of them.

    >>> written, half, base = SearchPoint(1.0, 100, False), SearchPoint(0.5, 80, False), SearchPoint(1.3, 60, False)
    >>> combined(base, half, written).needed  # 60 * 0.8
    48
    """

    def ratio(name: str) -> int:
        return int(getattr(base, name) * getattr(single, name) / max(getattr(written, name), 1))

    gradients, states = ratio("gradients"), ratio("states")
    constant = ratio("weights") + gradients + states
    fixed = constant + ratio("of_update") if base.fixed else 0
    time, other = base.time * single.time, ratio("activations")
    point = SearchPoint(time, 0, False, constant, gradients, fixed, other=other, states=states)
    return point._replace(needed=int(point.allocated * overhead(base)))


def cannot_fit(base: SearchPoint, knobs: Knobs, capacity: int) -> bool:
    """Return whether a setting that was run cannot fit with one more knob: what it leaves as it is exceeds `capacity`.

    >>> base = SearchPoint(1.0, 100, False, constant=40, fixed=60, peak=90)
    >>> [cannot_fit(base, knobs, 50) for knobs in (Knobs(checkpoint="sqrt"), Knobs(update="fused"), Knobs(lora="0"))]
    [True, True, False]
    """
    ((field, value),) = knobs.changed().items()
    match KNOBS[field].untouched(value):
        case Untouched.ALL_BUT_ACTIVATIONS:
            return base.fixed > capacity
        case Untouched.ALL_BUT_UPDATE:
            return base.peak > capacity
        case Untouched.EVERYTHING:
            return max(base.peak, base.fixed) > capacity
    return False
