"""Private names of data parallelism: functions of DDP and FSDP that are recognized as they run, and groups of ops."""

from __future__ import annotations

import sys
from functools import partial
from typing import Any

import torch

from memexplore.torch_internals.distributed import AVAILABLE, world
from memexplore.torch_internals.table import TABLE, Attribute, Internal, exists

_NO_CATEGORY = "blocks of {} have the categories of other blocks"


def _is_named(name: str) -> bool:
    return not AVAILABLE or exists(name)


def _function(name: str, why: str, kind: str) -> tuple[str, str]:
    """Add a row for a function of torch and return the names of its module and of its code; its module is not imported.

    Importing FSDP takes half a second.
    """
    TABLE.append(Internal(name, why, _NO_CATEGORY.format(kind), partial(_is_named, name)))
    parts = name.split(".")
    module = parts[:-2] if parts[-2][0].isupper() else parts[:-1]
    return ".".join(module), parts[-1]


MAKES_BUCKETS = frozenset(
    _function(
        f"torch.nn.parallel.distributed.DistributedDataParallel.{name}",
        "calls the C++ code that requests the buckets of gradients",
        "gradient buckets",
    )
    for name in ("_ddp_init_helper", "_pre_forward")
)
GATHERS_PARAMETERS = frozenset(
    {
        _function(
            "torch.distributed.fsdp._flat_param.FlatParamHandle._all_gather_flat_param",
            "gathers the parameters of FSDP1, also from a copy in another type",
            "gathered parameters",
        )
    }
)
REDUCES_GRADIENTS = frozenset(
    {
        _function(
            "torch.distributed.fsdp._runtime_utils._reduce_grad",
            "reduces and scatters the gradients of FSDP1",
            "gradient buckets",
        )
    }
)


def group_of(args: Any) -> tuple[str, int] | None:
    """Return name and size of the NCCL group among a collective's arguments, None for a group of another backend."""
    distributed: Any = torch.distributed
    if not AVAILABLE or not distributed.is_initialized():
        return None
    for value in reversed(args):
        group = None
        if isinstance(value, torch.ScriptObject):
            try:
                group = distributed.ProcessGroup.unbox(value)
            except (RuntimeError, TypeError):  # a ReduceOp
                continue
        elif isinstance(value, distributed.ProcessGroup):
            group = value
        elif isinstance(value, str) and value:
            group = next((named for named, name in world.pg_names.items() if name == value), None)
        if group is not None:
            return (group.group_name, group.size()) if "nccl" in distributed.get_backend_config(group) else None
    return None


def rank_and_world() -> tuple[int, int] | None:
    """Return the rank of this process and the number of processes, None without a group of several."""
    distributed: Any = torch.distributed
    if not AVAILABLE or not distributed.is_initialized() or distributed.get_world_size() < 2:
        return None
    return distributed.get_rank(), distributed.get_world_size()


ZERO = "torch.distributed.optim.zero_redundancy_optimizer"
"""The module of ZeroRedundancyOptimizer."""
TABLE.extend(
    Internal(f"{ZERO}.{name}", why, "`consolidate_state_dict` on a virtual GPU", partial(_is_named, f"{ZERO}.{name}"))
    for name, why in (
        ("_broadcast_object", "sends the state of one rank to all"),
        ("ZeroRedundancyOptimizer._partition_parameters", "has the parameters of each rank"),
    )
)


def sending_of_states() -> Attribute | None:
    """Return the function by which ZeroRedundancyOptimizer sends states, None where it is not imported.

    Importing it takes 0.2 s.
    """
    module = sys.modules.get(ZERO)
    return Attribute(module, "_broadcast_object") if hasattr(module, "_broadcast_object") else None


FSDP2 = "torch.distributed.fsdp._fully_shard._fsdp_param"
"""The module of the parameters of `fully_shard`."""
TABLE.append(
    Internal(
        f"{FSDP2}._chunk_with_empty",
        "makes the shard of each rank",
        "slow `fully_shard` with many ranks on a virtual GPU",
        partial(_is_named, f"{FSDP2}._chunk_with_empty"),
    )
)


def splitting_of_parameters() -> Attribute | None:
    """Return the function by which `fully_shard` splits a parameter, None where it is not imported."""
    module = sys.modules.get(FSDP2)
    return Attribute(module, "_chunk_with_empty") if hasattr(module, "_chunk_with_empty") else None


def parts_of(optimizer: Any) -> list[list[dict[str, Any]]]:
    """Return the parameter groups of each rank of a ZeroRedundancyOptimizer."""
    parts: list[list[dict[str, Any]]] = optimizer._partition_parameters()
    return parts
