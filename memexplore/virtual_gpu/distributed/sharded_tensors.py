"""ShardedTensor on one rank: the shards of other ranks, by the one of this rank, as for LOCAL_STATE_DICT of FSDP1.

In: the description of this rank's shard, which torch gathers from every rank. Out: those of all ranks, in parts of
equal size of which the last may be shorter. Source: `ShardedTensor._init_from_local_shards`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from memexplore.torch_internals.distributed_checkpoint import (
    FROM_LOCAL_SHARDS,
    GLOBAL_METADATA,
    ShardedTensorMetadata,
    ShardMetadata,
)
from memexplore.virtual_gpu.distributed.groups import is_ours
from memexplore.virtual_gpu.patches.install import Patch, Replace
from memexplore.virtual_gpu.tensors.local_device import GPUS_OF_A_NODE


class _Running:
    """The group of the tensor that is made, None outside of its construction or for a real group."""

    group: Any = None


def patches() -> list[Patch]:
    """Return the patches of the construction from local shards."""
    running = _Running()
    return [
        Replace(FROM_LOCAL_SHARDS.owner, FROM_LOCAL_SHARDS.name, _construct(FROM_LOCAL_SHARDS.value, running)),
        Replace(GLOBAL_METADATA.owner, GLOBAL_METADATA.name, _metadata(GLOBAL_METADATA.value, running)),
    ]


def _construct(original: Callable[..., Any], running: _Running) -> Any:
    def from_local_shards(cls: Any, shards: Any, *size: Any, process_group: Any = None, **options: Any) -> Any:
        before = running.group
        running.group = (process_group or dist.group.WORLD) if is_ours(process_group) else None
        try:
            return original.__func__(cls, shards, *size, process_group=process_group, **options)  # type: ignore[attr-defined]
        finally:
            running.group = before

    return classmethod(from_local_shards)


def _metadata(original: Callable[..., Any], running: _Running) -> Callable[..., Any]:
    """Return `build_global_metadata`, which joins the descriptions of all ranks, here copies of this rank's."""

    def build(gathered: Any, recalc_metadata: bool = False) -> Any:
        if running.group is not None and running.group.size() > 1:
            gathered = _of_all_ranks(gathered[running.group.rank()], running.group, recalc_metadata)
        return original(gathered, recalc_metadata=recalc_metadata)

    return build


def _of_all_ranks(own: Any, group: Any, sizes_are_gathered: bool) -> list[Any]:
    """Return the description of each rank's shard, None for a rank that has none.

    Raises RuntimeError where the shard of this rank does not say how the others are divided.
    """
    rank, world = group.rank(), group.size()
    shards = [] if own is None else own.shards_metadata
    if len(shards) != 1:
        raise RuntimeError(
            f"rank {rank} has {len(shards)} shards of a ShardedTensor, so those of the other ranks are not known on a "
            "virtual GPU: give each rank one shard, or use SHARDED_STATE_DICT or torch.distributed.checkpoint"
        )
    shard, total = shards[0], own.size
    offsets, lengths = list(shard.shard_offsets), list(shard.shard_sizes)
    numbers = list(range(world))
    if shard.placement.rank() != rank:
        numbers = [dist.get_global_rank(group, number) for number in range(world)]
    if sizes_are_gathered:
        return [_described(own, offsets, lengths, number, shard) for number in numbers]
    divided = [dim for dim in range(len(lengths)) if lengths[dim] != total[dim]]
    dim = divided[0] if divided else 0
    step, rest = divmod(offsets[dim], rank) if rank else (lengths[dim], 0)
    if len(divided) != 1 or rest or step * world < total[dim]:
        raise RuntimeError(
            f"the shard of rank {rank}, {lengths} of {list(total)} from {offsets} on, is not one of equal parts along "
            "one dimension, so those of other ranks are not known on a virtual GPU: use torch.distributed.checkpoint"
        )
    found: list[Any] = []
    for part, number in enumerate(numbers):
        begin = part * step
        length = min(step, total[dim] - begin)
        if length <= 0:
            found.append(None)
            continue
        offsets[dim], lengths[dim] = begin, length
        found.append(_described(own, offsets, lengths, number, shard))
    return found


def _described(own: Any, offsets: list[int], lengths: list[int], rank: int, shard: Any) -> Any:
    device: torch.device = shard.placement.device()
    place = f"{device.type}:{rank % GPUS_OF_A_NODE}" if device.type == "cuda" else str(device)
    one = ShardMetadata(list(offsets), list(lengths), f"rank:{rank}/{place}")
    return ShardedTensorMetadata([one], own.size, own.tensor_properties)
