"""The layout of several GPUs: which of them share parameters, hold copies, or share single layers.

In: `Knobs`. Out: a `Layout`, or sentences for contradictions between the knobs of several GPUs.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

from memexplore.knobs.choices import FsdpOffload, FsdpPrecision, Precision, Strategy, Update
from memexplore.knobs.knobs import Knobs
from memexplore.virtual_gpu.tensors.local_device import GPUS_OF_A_NODE

FSDP = (Strategy.FSDP2, Strategy.FSDP2_NO_RESHARD, Strategy.HSDP)
"""Strategies that shard the parameters by `fully_shard`."""
DIMENSIONS = ("replicate", "shard", "tensor")
"""Names of the dimensions of a device mesh, in the order of `Layout`."""
ON_ONE_GPU: dict[str, Any] = {
    "gpus": None,
    "strategy": Strategy.AS_WRITTEN,
    "tensor_parallel": None,
    "fsdp_precision": FsdpPrecision.AS_WRITTEN,
    "fsdp_offload": FsdpOffload.AS_WRITTEN,
}
"""Changes to knobs that make them a setting of one GPU."""


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


def strategy_of(knobs: Knobs) -> Strategy:
    """Return the strategy of a setting for several GPUs: DDP by default, none where all GPUs share each layer.

    >>> strategy_of(Knobs(gpus=2)), strategy_of(Knobs(gpus=2, tensor_parallel=2))
    (<Strategy.DDP: 'ddp'>, <Strategy.AS_WRITTEN: 'as written'>)
    """
    if knobs.strategy is Strategy.AS_WRITTEN and (knobs.gpus or 1) > (knobs.tensor_parallel or 1):
        return Strategy.DDP
    return knobs.strategy


def layout_of(knobs: Knobs) -> Layout:
    """Return the layout of a setting without contradictions.

    HSDP shards inside a node of eight GPUs, and on a single node inside one half of it.

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


def layout_conflicts(knobs: Knobs) -> Iterator[str]:
    """Yield a sentence for each contradiction between the knobs of several GPUs.

    >>> list(layout_conflicts(Knobs(strategy="fsdp2")))
    ["strategy='fsdp2' needs several GPUs: write gpus=8 as well"]
    """
    gpus, tensor = knobs.gpus or 1, knobs.tensor_parallel or 1
    if knobs.strategy is not Strategy.AS_WRITTEN and gpus == 1:
        yield f"strategy={knobs.strategy.value!r} needs several GPUs: write gpus=8 as well"
    if gpus % tensor:
        yield f"tensor_parallel={tensor} does not divide gpus={gpus}: write one of its divisors"
        return
    strategy = strategy_of(knobs)
    if tensor > 1 and tensor < gpus and strategy not in FSDP:
        yield (
            f"tensor_parallel={tensor} on {gpus} GPUs needs a strategy for the {gpus // tensor} groups that shards: "
            "write strategy='fsdp2'"
        )
    if tensor > 1 and tensor == gpus and knobs.strategy is not Strategy.AS_WRITTEN:
        yield f"tensor_parallel={tensor} leaves no GPUs for strategy={strategy.value!r}: take more GPUs, or no strategy"
    if tensor > 1 and knobs.precision in (Precision.FP16, Precision.BF16):
        yield (
            "autocast in layers that several GPUs share is not simulated: write precision='all bf16', or "
            "fsdp_precision='bf16' with strategy='fsdp2'"
        )
    if strategy is Strategy.HSDP and gpus > 1 and layout_of(knobs).shard == 1:
        yield f"hsdp needs GPUs in groups of equal size, and gpus={gpus} cannot be divided: write gpus=4 or more"
    for field in ("fsdp_precision", "fsdp_offload"):
        if getattr(knobs, field) not in (FsdpPrecision.AS_WRITTEN, FsdpOffload.AS_WRITTEN) and strategy not in FSDP:
            yield f"{field} is a policy of FSDP2: write strategy='fsdp2' as well"
    if knobs.update is Update.IN_BACKWARD and gpus > 1:
        yield "update in backward runs before the gradients of the GPUs are added: write another update, or gpus=1"
