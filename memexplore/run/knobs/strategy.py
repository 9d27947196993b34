"""The knob `strategy`: what several GPUs share."""

from __future__ import annotations

import enum
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from memexplore.run.knobs.knob import Group, Knob, Stage
from memexplore.run.knobs.values import OneOf
from memexplore.run.machine import Kind

if TYPE_CHECKING:
    from memexplore.run.knobs.control import Explored
    from memexplore.run.knobs.knobs import Knobs


class Strategy(enum.Enum):
    """Division of the training between several GPUs; each wraps every repeated block and then the model.

    `FSDP2_NO_RESHARD` keeps the gathered parameters from forward to backward, `HSDP` shards inside a node of eight GPUs
    and keeps a copy on each node, `ZERO_1` is DDP with a `ZeroRedundancyOptimizer`.
    """

    AS_WRITTEN = "as written"
    DDP = "ddp"
    FSDP2 = "fsdp2"
    FSDP2_NO_RESHARD = "fsdp2 no reshard"
    HSDP = "hsdp"
    ZERO_1 = "zero 1"


FSDP = (Strategy.FSDP2, Strategy.FSDP2_NO_RESHARD, Strategy.HSDP)
"""Strategies that shard the parameters by `fully_shard`."""
PROCESSES_RUN = "The processes of the loop are running: start it again on other GPUs with torchrun."
FIRST_SEVERAL = "Choose more than one GPU first"
FIRST_FSDP2 = "It is a policy of FSDP2: choose that strategy first"
_NAMES = {
    Strategy.DDP: "DDP",
    Strategy.FSDP2: "FSDP2",
    Strategy.FSDP2_NO_RESHARD: "FSDP2 without resharding after forward",
    Strategy.HSDP: "HSDP",
    Strategy.ZERO_1: "DDP with ZeRO-1",
}


class StrategyKnob(Knob):
    """What several GPUs share: nothing (DDP, the default), or shards of weights, gradients and optimizer state.

    FSDP2 wraps each repeated block, then the model.
    """

    name = "strategy"
    costs = "equal results, other communication"
    values = OneOf(Strategy)
    place = 190
    group = Group.SEVERAL_GPUS
    needs_step = "{} wraps its model itself"
    locked = PROCESSES_RUN
    stage = Stage.PROCESS
    adds_only_recomputation = True

    def phrase(self, value: Any) -> str:
        """Return the name of the strategy."""
        return _NAMES[value]

    def conflicts(self, value: Any, knobs: Knobs, explored: Explored) -> Iterator[str]:
        """Yield a sentence for one GPU."""
        if (knobs.gpus or 1) == 1:
            yield f"strategy={value.value!r} needs several GPUs: write gpus=8 as well"

    def option(self, value: Any) -> str:
        """Return the name, as wide as a control."""
        if value is Strategy.FSDP2_NO_RESHARD:
            return "FSDP2, no resharding"
        return _NAMES.get(value, self.values.text(value))

    def hidden(self, explored: Explored) -> str:
        """Return that a CPU is not several GPUs."""
        return hidden_on_cpu(explored)

    def not_now(self, knobs: Knobs) -> str:
        """Return that several GPUs come first."""
        return FIRST_SEVERAL if (knobs.gpus or 1) == 1 else ""


def strategy_of(knobs: Knobs) -> Strategy:
    """Return the strategy of a setting for several GPUs: DDP by default, none where all GPUs share each layer.

    >>> from memexplore.run.knobs.knobs import Knobs
    >>> strategy_of(Knobs(gpus=2)), strategy_of(Knobs(gpus=2, tensor_parallel=2))
    (<Strategy.DDP: 'ddp'>, <Strategy.AS_WRITTEN: 'as written'>)
    """
    if knobs.strategy is Strategy.AS_WRITTEN and (knobs.gpus or 1) > (knobs.tensor_parallel or 1):
        return Strategy.DDP
    return knobs.strategy


def hidden_on_cpu(explored: Explored) -> str:
    """Return that a CPU is not several GPUs, empty for another machine."""
    is_cpu = explored.machine is not None and explored.machine.kind is Kind.CPU
    return "a CPU is one device: name a GPU" if is_cpu else ""
