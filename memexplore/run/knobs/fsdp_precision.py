"""The knob `fsdp_precision`: a policy of FSDP2."""

from __future__ import annotations

import enum
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from memexplore.run.knobs.knob import Group, Knob, Stage
from memexplore.run.knobs.strategy import (
    FIRST_FSDP2,
    FIRST_SEVERAL,
    FSDP,
    PROCESSES_RUN,
    hidden_on_cpu,
    strategy_of,
)
from memexplore.run.knobs.values import OneOf

if TYPE_CHECKING:
    from memexplore.run.knobs.control import Explored
    from memexplore.run.knobs.knobs import Knobs


class FsdpPrecision(enum.Enum):
    """`MixedPrecisionPolicy` of FSDP2: dtype of the gathered parameters and of the reduced gradients."""

    AS_WRITTEN = "as written"
    REDUCED_IN_FP32 = "bf16, reduced in fp32"
    BF16 = "bf16"


class FsdpPrecisionKnob(Knob):
    """`MixedPrecisionPolicy` of FSDP2: the type of gathered parameters and of reduced gradients."""

    name, word = "fsdp_precision", "FSDP precision"
    costs = "other rounding, less communication"
    values = OneOf(FsdpPrecision)
    place = 210
    group = Group.SEVERAL_GPUS
    needs_step = "{} wraps its model itself"
    locked = PROCESSES_RUN
    stage = Stage.PROCESS
    adds_only_recomputation = True

    def phrase(self, value: Any) -> str:
        """Return the policy."""
        return f"FSDP2 in {value.value}"

    def conflicts(self, value: Any, knobs: Knobs, explored: Explored) -> Iterator[str]:
        """Yield a sentence for another strategy."""
        if strategy_of(knobs) not in FSDP:
            yield "fsdp_precision is a policy of FSDP2: write strategy='fsdp2' as well"

    def hidden(self, explored: Explored) -> str:
        """Return that a CPU is not several GPUs."""
        return hidden_on_cpu(explored)

    def not_now(self, knobs: Knobs) -> str:
        """Return that several GPUs and FSDP2 come first."""
        if (knobs.gpus or 1) == 1:
            return FIRST_SEVERAL
        return "" if knobs.strategy in FSDP else FIRST_FSDP2
