"""The knob `zero_grad`: what the gradients are after `zero_grad`."""

from __future__ import annotations

import enum
from typing import Any

from memexplore.run.knobs.applying.loop import Loop
from memexplore.run.knobs.control import Explored
from memexplore.run.knobs.knob import Group, Knob, Limits, Stage
from memexplore.run.knobs.values import OneOf


class ZeroGrad(enum.Enum):
    """Value of the gradients after `zero_grad`: None or zeros."""

    AS_WRITTEN = "as written"
    TO_NONE = "set to none"
    TO_ZERO = "set to zero"


class ZeroGradKnob(Knob):
    """What `zero_grad` does with the gradients: it frees them, or fills them with zeros."""

    name = "zero_grad"
    costs = "equal results"
    values = OneOf(ZeroGrad)
    place = 80
    group = Group.OPTIMIZER
    locked = "The loop itself calls zero_grad: change its argument there."
    stage = Stage.UPDATE
    adds_only_recomputation = True

    def phrase(self, value: Any) -> str:
        """Return what becomes of the gradients."""
        return f"gradients {value.value}"

    def change_loop(self, value: Any, loop: Loop) -> None:
        """Free the gradients after the update, or fill them with zeros."""
        loop.zero_gradients = value is ZeroGrad.TO_ZERO

    def written(self, explored: Explored) -> str:
        """Return what a step does."""
        return "" if explored.model is None else "to None"

    def option(self, value: Any) -> str:
        """Return what the gradients are set to."""
        return {ZeroGrad.TO_NONE: "to None", ZeroGrad.TO_ZERO: "to zeros"}.get(value, self.values.text(value))

    def unavailable(self, limits: Limits) -> str:
        """Return why there is no call to change."""
        return limits.no_zero_grad
