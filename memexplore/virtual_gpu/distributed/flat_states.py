"""Optimizer states of FSDP1 on one rank: names of the states that rank 0 sends, and parameters of other ranks.

In: the functions by which torch gathers names and shapes of the states of all ranks. Out: the same for all parameters,
with a state like one of this rank where this rank has none (`use_orig_params`). Source:
torch/distributed/fsdp/_optim_utils.py.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from memexplore.torch_internals.distributed_checkpoint import FLAT_STATE_INFO, FLAT_STATE_KEYS, FlatStateKey, has_part
from memexplore.virtual_gpu.distributed import objects
from memexplore.virtual_gpu.distributed.groups import is_ours
from memexplore.virtual_gpu.patches.install import Patch, Replace


class _Own:
    """A state of this rank, which stands for those of other ranks."""

    state: Any = None


def patches() -> list[Patch]:
    """Return the patches of the states of optimizers."""
    own = _Own()
    return [
        Replace(FLAT_STATE_KEYS.owner, FLAT_STATE_KEYS.name, _keys_of_all(FLAT_STATE_KEYS.value, own)),
        Replace(FLAT_STATE_INFO.owner, FLAT_STATE_INFO.name, _info_of_all(FLAT_STATE_INFO.value, own)),
    ]


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
            gathered, found = original(states, group, params, names, units, merge_keys)
        if merge_keys and found:
            own.state = states["state"][next(iter(found.values()))]
            gathered = sorted(
                {*gathered, *(FlatStateKey((name,), True) for name in units if _is_away(units[name], name))}
            )
        return gathered, found

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
            name: found if states[name] else type(found)({}, {}, {}) for name, found in gathered[fsdp.rank].items()
        }
        return gathered

    return info
