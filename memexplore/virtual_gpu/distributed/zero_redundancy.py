"""Give ZeroRedundancyOptimizer on one rank the states of other ranks: `consolidate_state_dict` brings all to one rank.

Every rank knows the partition of the parameters; states of other ranks have the entries that a state of this rank has.
Source: torch/distributed/optim/zero_redundancy_optimizer.py.
"""

from __future__ import annotations

import io
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from memexplore.torch_internals.dispatch import pytree
from memexplore.torch_internals.sharded import parts_of, sending_of_states
from memexplore.virtual_gpu.distributed.groups import is_ours
from memexplore.virtual_gpu.patches.install import Patch, Replace


def patches() -> list[Patch]:
    """Return the patches, none where the optimizer is not imported."""
    sending = sending_of_states()
    if sending is None:
        return []
    zero, running = sending.owner.ZeroRedundancyOptimizer, _Running()
    return [
        Replace(sending.owner, sending.name, _broadcast(sending.value, running)),
        Replace(zero, "consolidate_state_dict", _consolidate(zero.consolidate_state_dict, running)),
    ]


@dataclass(frozen=True)
class _Entry:
    """A tensor in a state that is sent."""

    size: torch.Size
    dtype: torch.dtype

    @property
    def bytes(self) -> int:
        """Size of its numbers."""
        return self.size.numel() * self.dtype.itemsize


def _entry(tensor: torch.Tensor) -> _Entry:
    return _Entry(tensor.size(), tensor.dtype)


class _Running:
    """The optimizer whose states are brought to one rank."""

    optimizer: Any = None


def _consolidate(original: Callable[..., Any], running: _Running) -> Callable[..., Any]:
    def consolidate_state_dict(optimizer: Any, to: int = 0) -> None:
        running.optimizer = optimizer
        try:
            original(optimizer, to)
        finally:
            running.optimizer = None

    return consolidate_state_dict


def _broadcast(original: Callable[..., Any], running: _Running) -> Callable[..., Any]:
    """Return the function that sends the state of a rank as bytes, with as many bytes as its tensors have."""

    def broadcast(obj: Any, src_rank: int, group: Any = None, device: Any = "cpu") -> Any:
        if not is_ours(group) or running.optimizer is None:
            return original(obj, src_rank, group, device)
        sends = dist.get_rank() == src_rank
        state = obj if sends else _state_of(running.optimizer, dist.get_group_rank(group, src_rank))
        dist.broadcast(torch.zeros(1, dtype=torch.long, device=device), src=src_rank, group=group)
        data = torch.empty(_saved_bytes(state), dtype=torch.uint8, device=device)
        dist.broadcast(data, src=src_rank, group=group)
        if sends:
            return obj
        return pytree.tree_map_only(
            _Entry, lambda entry: torch.empty(entry.size, dtype=entry.dtype, device=device), state
        )

    return broadcast


def _state_of(optimizer: Any, rank: int) -> Any:
    """Return the state dict of a rank, with an `_Entry` for each tensor, by those of the first parameter of this rank.

    A tensor of the size of its parameter has the size of the other parameter there.
    """
    local = optimizer.optim
    own = next(((weight, local.state[weight]) for weight in local.state), None)
    groups: list[dict[str, Any]] = []
    state: dict[int, dict[str, Any]] = {}
    for group in parts_of(optimizer)[rank]:
        first = len(state)
        for weight in group["params"]:
            state[len(state)] = {} if own is None else _like(*own, weight)
        groups.append({**group, "params": list(range(first, len(state)))})
    return {"state": state if own else {}, "param_groups": groups}


def _like(own: torch.Tensor, entries: dict[str, Any], weight: torch.Tensor) -> dict[str, Any]:
    return {
        name: _Entry(weight.size() if value.size() == own.size() else value.size(), value.dtype)
        if isinstance(value, torch.Tensor)
        else value
        for name, value in entries.items()
    }


def _saved_bytes(state: Any) -> int:
    """Return the bytes of a saved state: those of the numbers of its tensors, and nearly those of the rest."""
    entries = pytree.tree_map_only(torch.Tensor, _entry, state)
    buffer = io.BytesIO()
    torch.save(entries, buffer)
    return buffer.tell() + sum(entry.bytes for entry in pytree.tree_leaves(entries) if isinstance(entry, _Entry))
