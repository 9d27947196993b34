"""Save and load the part of this rank by `torch.distributed.checkpoint`, whose plans this rank joins itself.

The requests to the allocator are those of torch's own functions, with the plan of this rank as the plan of all ranks.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from memexplore.torch_internals.distributed_checkpoint import (
    BROADCAST_STATES,
    BROADCAST_STATES_IN_USE,
    STAGE_TENSOR,
    VALIDATE_PLAN,
    EmptyMetadata,
    Messages,
    TensorInfo,
)
from memexplore.virtual_gpu.distributed import objects
from memexplore.virtual_gpu.distributed.groups import is_ours
from memexplore.virtual_gpu.patches.install import Patch, Replace
from memexplore.virtual_gpu.tensors.tensor import is_virtual
from memexplore.virtual_gpu.values import notes

_ASSUMED = (
    "torch.distributed.checkpoint saved and loaded the part of this rank only, whose files are no whole checkpoint"
)


def patches() -> list[Patch]:
    """Return the patches of checkpoints."""
    return [
        Replace(Messages, "__init__", _joining(Messages.__init__)),
        *(Replace(Messages, name, _own(getattr(Messages, name), send)) for name, send in _SENT.items()),
        Replace(STAGE_TENSOR.owner, STAGE_TENSOR.name, _stage(STAGE_TENSOR.value)),
        Replace(VALIDATE_PLAN.owner, VALIDATE_PLAN.name, _valid_part(VALIDATE_PLAN.value)),
        *(
            Replace(function.owner, function.name, _broadcast_states(function.value))
            for function in (BROADCAST_STATES, BROADCAST_STATES_IN_USE)
        ),
    ]


def _is_virtual(messages: Any) -> bool:
    return bool(messages.use_dist and is_ours(messages.group))


def _joining(original: Callable[..., Any]) -> Callable[..., Any]:
    """Return the constructor of messages, which makes this rank the one that joins the plans."""

    def construct(messages: Any, *args: Any, **kwargs: Any) -> None:
        original(messages, *args, **kwargs)
        if _is_virtual(messages):
            messages.is_coordinator = True
            if dist.get_world_size(messages.group) > 1:
                notes.add(f"assumed: {_ASSUMED}")

    return construct


def _gather(messages: Any, obj: Any) -> list[Any]:
    receives = messages.rank == messages.coordinator_rank
    received = [None] * dist.get_world_size(messages.group) if receives else None
    dist.gather_object(obj, received, messages.global_coordinator_rank, messages.group)
    return [obj]


def _all_gather(messages: Any, obj: Any) -> list[Any]:
    dist.all_gather_object([None] * dist.get_world_size(messages.group), obj, messages.group)
    return [obj]


def _scatter(messages: Any, parts: list[Any]) -> Any:
    sends = messages.rank == messages.coordinator_rank
    everywhere = parts[:1] * dist.get_world_size(messages.group) if sends else None
    with objects.received(parts[0]):
        dist.scatter_object_list([None], everywhere, messages.global_coordinator_rank, messages.group)
    return parts[0]


def _broadcast(messages: Any, obj: Any) -> Any:
    with objects.received(obj):
        dist.broadcast_object_list([obj], messages.global_coordinator_rank, messages.group)
    return obj


_SENT: dict[str, Callable[..., Any]] = {
    "gather_object": _gather,
    "all_gather_object": _all_gather,
    "scatter_object": _scatter,
    "broadcast_object": _broadcast,
}


def _own(original: Callable[..., Any], send: Callable[..., Any]) -> Callable[..., Any]:
    def call(messages: Any, value: Any) -> Any:
        return send(messages, value) if _is_virtual(messages) else original(messages, value)

    return call


def _valid_part(original: Callable[..., Any]) -> Callable[..., Any]:
    """Return a check of plans that accepts the part of one rank: True, or no errors since torch 2.13."""
    valid = original([], EmptyMetadata({}))

    def validate(plans: Any, metadata: Any) -> Any:
        return valid if is_ours(None) else original(plans, metadata)

    return validate


def _stage(original: Callable[..., Any]) -> Callable[..., Any]:
    """Return the function by which `async_save` copies a tensor to the CPU; it keeps the copy in `memo`."""

    def stage(stager: Any, tensor: Any, memo: dict[int, Any], **options: Any) -> Any:
        if not is_virtual(tensor):
            return original(stager, tensor, memo, **options)
        memo[id(tensor)] = copy = tensor.detach().to("cpu", copy=True)
        return copy

    return stage


def _broadcast_states(original: Callable[..., Any]) -> Callable[..., Any]:
    """Return the function by which rank 0 sends a state dict; it has the names and shapes that this rank has."""

    def broadcast(full: dict[str, Any], local: dict[str, Any], *args: Any, **kwargs: Any) -> None:
        if not is_ours(None) or dist.get_rank() == 0:
            original(full, local, *args, **kwargs)
            return
        sent = {name: _description(value) for name, value in local.items()}
        with objects.received(sent):
            original(full, local, *args, **kwargs)

    return broadcast


def _description(value: Any) -> Any:
    if isinstance(value, torch.Tensor) and value.dim():
        return TensorInfo(value.size(), value.dtype)
    return value
