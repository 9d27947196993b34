"""Give FSDP1 on one rank the states and shards that other ranks have.

Of the states of an optimizer: the names that rank 0 sends, and a state like one of this rank where this rank has none
(`use_orig_params`); source: torch/distributed/fsdp/_optim_utils.py. Of a ShardedTensor, as of LOCAL_STATE_DICT: the
descriptions of the shards of all ranks, in parts of equal size of which the last may be shorter; source:
`ShardedTensor._init_from_local_shards`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from memexplore.torch_internals.distributed_checkpoint import (
    FLAT_STATE_INFO,
    FLAT_STATE_KEYS,
    FROM_LOCAL_SHARDS,
    GLOBAL_METADATA,
    FlatStateKey,
    ShardedTensorMetadata,
    ShardMetadata,
    has_part,
)
from memexplore.virtual_gpu.distributed import objects
from memexplore.virtual_gpu.distributed.groups import is_ours
from memexplore.virtual_gpu.patches.install import Patch, Replace
from memexplore.virtual_gpu.tensors.local_device import GPUS_OF_A_NODE


def patches() -> list[Patch]:
    """Return the patches of the states of optimizers, and of the construction of ShardedTensors from local shards."""
    own, running = _Own(), _Running()
    return [
        Replace(FLAT_STATE_KEYS.owner, FLAT_STATE_KEYS.name, _keys_of_all(FLAT_STATE_KEYS.value, own)),
        Replace(FLAT_STATE_INFO.owner, FLAT_STATE_INFO.name, _info_of_all(FLAT_STATE_INFO.value, own)),
        Replace(FROM_LOCAL_SHARDS.owner, FROM_LOCAL_SHARDS.name, _construct(FROM_LOCAL_SHARDS.value, running)),
        Replace(GLOBAL_METADATA.owner, GLOBAL_METADATA.name, _metadata(GLOBAL_METADATA.value, running)),
    ]


# --- states of optimizers ---------------------------------------------------------------------------------------------


class _Own:
    """A state of this rank, which stands for those of other ranks."""

    state: Any = None


def _keys_of_all(original: Callable[..., Any], own: _Own) -> Callable[..., Any]:
    """Return the function that gathers the names of parameters with states, and finds those of this rank."""

    def keys(
        states: dict[str, Any],
        group: Any,
        params: dict[Any, Any],
        names: dict[Any, Any],
        units: dict[str, Any],
        merge_keys: bool = False,
    ) -> Any:
        if not is_ours(group):
            return original(states, group, params, names, units, merge_keys)
        # Every rank has the states that rank 0 has: each has a part of every flat parameter.
        sent = [
            FlatStateKey(tuple(names[param]), names[param][0] in units)
            for key, param in params.items()
            if key in states["state"]
        ]
        with objects.received(sent):
            gathered, keys_of_names = original(states, group, params, names, units, merge_keys)
        if merge_keys and keys_of_names:
            own.state = states["state"][next(iter(keys_of_names.values()))]
            gathered = sorted(
                {*gathered, *(FlatStateKey((name,), True) for name in units if _is_away(units[name], name))}
            )
        return gathered, keys_of_names

    return keys


def _is_away(unit: Any, name: str) -> bool:
    """Return whether a parameter is trained and this rank has no part of it."""
    index = unit.param_indices[name]
    return unit.param_requires_grad[index] and not has_part(unit.handle.flat_param, index)


def _info_of_all(original: Callable[..., Any], own: _Own) -> Callable[..., Any]:
    """Return the function that gathers shapes of the states of some parameters, one table for each rank."""

    def info(fsdp: Any, states: dict[str, Any]) -> Any:
        if not is_ours(fsdp.process_group):
            return original(fsdp, states)
        gathered = original(fsdp, {name: state or own.state or {} for name, state in states.items()})
        gathered[fsdp.rank] = {
            name: shapes if states[name] else type(shapes)({}, {}, {}) for name, shapes in gathered[fsdp.rank].items()
        }
        return gathered

    return info


# --- shards of ShardedTensors -----------------------------------------------------------------------------------------


class _Running:
    """The group of the tensor that is made, None outside of its construction or for a real group."""

    group: Any = None


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
    shards_of_ranks: list[Any] = []
    for part, number in enumerate(numbers):
        begin = part * step
        length = min(step, total[dim] - begin)
        if length <= 0:
            shards_of_ranks.append(None)
            continue
        offsets[dim], lengths[dim] = begin, length
        shards_of_ranks.append(_described(own, offsets, lengths, number, shard))
    return shards_of_ranks


def _described(own: Any, offsets: list[int], lengths: list[int], rank: int, shard: Any) -> Any:
    device: torch.device = shard.placement.device()
    place = f"{device.type}:{rank % GPUS_OF_A_NODE}" if device.type == "cuda" else str(device)
    described = ShardMetadata(list(offsets), list(lengths), f"rank:{rank}/{place}")
    return ShardedTensorMetadata([described], own.size, own.tensor_properties)
