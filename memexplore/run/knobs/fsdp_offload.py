"""The knob `fsdp_offload`: a policy of FSDP2."""

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


class FsdpOffload(enum.Enum):
    """`CPUOffloadPolicy` of FSDP2: where the shards of parameters, gradients and optimizer state are."""

    AS_WRITTEN = "as written"
    SHARDS = "shards on the CPU"


class FsdpOffloadKnob(Knob):
    """`CPUOffloadPolicy` of FSDP2: shards of parameters, gradients and optimizer state wait on the CPU."""

    name, word = "fsdp_offload", "FSDP offload"
    costs = "equal results, slower"
    values = OneOf(FsdpOffload)
    place = 220
    group = Group.SEVERAL_GPUS
    needs_step = "{} wraps its model itself"
    locked = PROCESSES_RUN
    stage = Stage.PROCESS
    adds_only_recomputation = True

    def phrase(self, value: Any) -> str:
        """Return the policy."""
        return self.values.text(value)

    def conflicts(self, value: Any, knobs: Knobs, explored: Explored) -> Iterator[str]:
        """Yield a sentence for another strategy."""
        if strategy_of(knobs) not in FSDP:
            yield "fsdp_offload is a policy of FSDP2: write strategy='fsdp2' as well"

    def hidden(self, explored: Explored) -> str:
        """Return that a CPU is not several GPUs."""
        return hidden_on_cpu(explored)

    def not_now(self, knobs: Knobs) -> str:
        """Return that several GPUs and FSDP2 come first."""
        if (knobs.gpus or 1) == 1:
            return FIRST_SEVERAL
        return "" if knobs.strategy in FSDP else FIRST_FSDP2
