"""The knob `gpus`: the number of GPUs, and the layout of the groups that share parameters or single layers."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, NamedTuple

from memexplore.run.knobs.applying.report import counted
from memexplore.run.knobs.control import Control, Explored, counter, numbers
from memexplore.run.knobs.knob import Group, Knob, Stage
from memexplore.run.knobs.strategy import FSDP, PROCESSES_RUN, Strategy, hidden_on_cpu, strategy_of
from memexplore.run.knobs.values import Number
from memexplore.run.machine import Kind, Machine
from memexplore.virtual_gpu.tensors.local_device import GPUS_OF_A_NODE

if TYPE_CHECKING:
    from memexplore.run.knobs.knobs import Knobs

COUNTS = (1, 2, 4, 8, 16, 32, 64)
"""Numbers of GPUs on a control."""
DIMENSIONS = ("replicate", "shard", "tensor")
"""Names of the dimensions of a device mesh, in the order of `Layout`."""


class GpusKnob(Knob):
    """The number of GPUs, with a process for each as `torchrun` starts them.

    On a real GPU a setting of several runs on the virtual one with its numbers.
    """

    name, word = "gpus", "GPUs"
    values = Number()
    place = 180
    group = Group.SEVERAL_GPUS
    needs_step = "{} makes its process group itself: mx.Step runs on several GPUs"
    locked = PROCESSES_RUN
    stage = Stage.PROCESS
    adds_only_recomputation = True

    def text(self, value: Any) -> str:
        """Return the number with its unit."""
        return counted(value, "GPU")

    def phrase(self, value: Any) -> str:
        """Return the number with its unit."""
        return self.text(value)

    def on_machine(self, value: Any, machine: Machine) -> Machine:
        """Return the first rank of a machine of several GPUs."""
        if value > 1 and machine.kind is Kind.CPU:
            raise ValueError("gpus= are several GPUs, and this target is a CPU: name a GPU as well, such as gpu='T4'")
        return (machine.twin() if value > 1 else machine).replace(world=value, rank=0)

    def conflicts(self, value: Any, knobs: Knobs, explored: Explored) -> Iterator[str]:
        """Yield a sentence where the GPUs cannot be divided into groups."""
        divides = value % (knobs.tensor_parallel or 1) == 0
        if strategy_of(knobs) is Strategy.HSDP and value > 1 and divides and layout_of(knobs).shard == 1:
            yield f"hsdp needs GPUs in groups of equal size, and gpus={value} cannot be divided: write gpus=4 or more"

    def controls(self, explored: Explored) -> list[Control]:
        """Return a slider; what one GPU cannot have is as written there."""

        def with_gpus(knobs: Knobs, value: int) -> Knobs:
            if value == 1:
                return knobs.without(Group.SEVERAL_GPUS)
            tensor = knobs.tensor_parallel
            return knobs.replace(gpus=value, tensor_parallel=tensor if tensor and value % tensor == 0 else None)

        unit = "GPUs, each with this batch"
        slider = counter(self, 1, lambda knobs: numbers(COUNTS), unit=unit, unit_of_one="GPU")
        return [] if explored.machine is None else [dataclasses.replace(slider, updated=with_gpus)]

    def hidden(self, explored: Explored) -> str:
        """Return that a CPU is not several GPUs."""
        return hidden_on_cpu(explored)


class Layout(NamedTuple):
    """Sizes of the groups that a rank belongs to; their product is the number of GPUs."""

    replicate: int
    """Copies of the parameters."""
    shard: int
    """GPUs that share one copy."""
    tensor: int
    """GPUs that share each layer and its activations."""

    @property
    def data_parallel(self) -> int:
        """Number of different batches in a step."""
        return self.replicate * self.shard


def several(knobs: Knobs) -> bool:
    """Return whether a setting runs on more than one GPU."""
    return (knobs.gpus or 1) > 1


def layout_of(knobs: Knobs) -> Layout:
    """Return the layout of a setting without contradictions.

    HSDP shards inside a node of eight GPUs, and on a single node inside one half of it.

    >>> from memexplore.run.knobs.knobs import Knobs
    >>> layout_of(Knobs(gpus=32, strategy="hsdp")), layout_of(Knobs(gpus=4, strategy="hsdp"))
    (Layout(replicate=4, shard=8, tensor=1), Layout(replicate=2, shard=2, tensor=1))
    """
    tensor = knobs.tensor_parallel or 1
    groups, strategy = (knobs.gpus or 1) // tensor, strategy_of(knobs)
    if strategy is Strategy.HSDP:
        sizes = [size for size in range(1, groups) if groups % size == 0 and size * tensor <= GPUS_OF_A_NODE]
        shard = max(sizes, default=1)
    else:
        shard = groups if strategy in FSDP else 1
    return Layout(groups // shard, shard, tensor)
