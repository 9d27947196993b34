"""`torch.distributed.rpc`: calls of functions on other processes, which end in one sentence."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from memexplore.virtual_gpu.distributed import ranks
from memexplore.virtual_gpu.patches.install import Patch, Replace
from memexplore.virtual_gpu.tensors.values import NotSimulated


def patches() -> list[Patch]:
    """Return the patch, none where this build of torch has no remote calls."""
    rpc = torch.distributed.rpc
    return [Replace(rpc, "init_rpc", _of_one(rpc.init_rpc))] if rpc.is_available() else []


def _of_one(original: Callable[..., Any]) -> Callable[..., Any]:
    """Return `init_rpc` for a process that is alone; torch waits for the others without an end."""

    @functools.wraps(original)
    def init_rpc(
        name: str, backend: Any = None, rank: int = -1, world_size: int | None = None, *rest: Any, **options: Any
    ) -> Any:
        world = world_size or ranks.of_rendezvous("").world
        if world > 1:
            raise NotSimulated(
                f"torch.distributed.rpc calls functions on {world - 1} other processes, which do not run beside a "
                "virtual GPU: run the work of one of them without rpc, send tensors by torch.distributed, or profile "
                "on real GPUs"
            )
        return original(name, backend, rank, world_size, *rest, **options)

    return init_rpc
