"""Say why the peak of a step is higher than every earlier one.

A reason is named only if it was recorded; without one the text says so, and the next recorded step gives the layer.
"""

from __future__ import annotations

from typing import NamedTuple

from memexplore.live.shapes import Shapes, difference
from memexplore.text.units import size_text

LEAST_RISE = 0.001
"""Share of the highest marked peak below which a higher peak is not marked."""
FIRST = "first step"
UNEXPLAINED = "not recorded"
_MOST_OF = 0.5


class Facts(NamedTuple):
    """What was noted about one step besides its row; sizes in bytes."""

    step: int = 0
    peak: int = 0
    shapes: Shapes = ()
    """Of the inputs of the call with the largest inputs."""
    micro_batches: int = 0
    in_validation: bool = False
    """Whether the peak was reached in a call of the model without gradients."""
    state_size: int = 0
    """Bytes of the optimizer's state at the end of the step, 0 if not recorded."""
    kept: int = 0
    """Bytes allocated when the step began."""
    training: bool = True
    """Whether the model was in training mode in its calls with gradients."""
    setting: str = ""
    """The knobs in effect."""


def rises(peak: int, marked: int) -> bool:
    """Return whether a peak is marked as higher than the highest marked one."""
    return peak > marked + max(int(marked * LEAST_RISE), 511)


def reason(now: Facts, before: Facts | None, leaks: bool) -> str:
    """Return why the peak of a step is above the highest peak of the steps before it.

    `leaks` says whether memory at the borders of steps keeps rising.

    >>> reason(Facts(1, 100), None, leaks=False)
    'first step'
    >>> reason(Facts(2, 200, state_size=90), Facts(1, 100), leaks=False)
    'optimizer state: 90 B more'
    """
    if before is None:
        return FIRST
    if now.in_validation and not before.in_validation:
        return "validation: the model ran without gradients between two steps"
    reasons = [difference(now.shapes, before.shapes)]
    if now.setting != before.setting:
        reasons.append(f"setting: {now.setting}")
    if now.micro_batches != before.micro_batches:
        reasons.append(f"micro-batches: {now.micro_batches} instead of {before.micro_batches}")
    rise = now.peak - before.peak
    if now.state_size > before.state_size:
        reasons.append(f"optimizer state: {size_text(now.state_size - before.state_size)} more")
    elif now.kept - before.kept > _MOST_OF * rise:
        more = size_text(now.kept - before.kept)
        reasons.append(f"leak: {more} more" if leaks else f"kept between steps: {more} more when the step began")
    return "; ".join(filter(None, reasons)) or UNEXPLAINED
