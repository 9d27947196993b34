"""Give DistributedDataParallel what its C++ part reads back from the GPU.

Buckets, hooks and reductions are torch's own. Source: torch/csrc/distributed/c10d/reducer.cpp.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from memexplore.torch_internals.distributed import BUILTIN_HOOK, COPY_STREAMS, REBUILD_BUCKETS, VERIFY_PARAMETERS
from memexplore.torch_internals.memory_access import Reading, update_reading
from memexplore.virtual_gpu.dispatch.runner import PlanRunner
from memexplore.virtual_gpu.distributed.groups import is_ours
from memexplore.virtual_gpu.patches.install import Patch, Replace
from memexplore.virtual_gpu.tensors.live_storages import storages
from memexplore.virtual_gpu.tensors.tensor import is_virtual
from memexplore.virtual_gpu.values import known_values


def patches(runner: PlanRunner) -> list[Patch]:
    """Return the patches of the functions that read values back."""
    return [
        Replace(Reading, "by_reducer", False),
        Replace(VERIFY_PARAMETERS.owner, VERIFY_PARAMETERS.name, _verify(VERIFY_PARAMETERS.value)),
        Replace(REBUILD_BUCKETS.owner, REBUILD_BUCKETS.name, _rebuild(REBUILD_BUCKETS.value, runner)),
        Replace(BUILTIN_HOOK.owner, BUILTIN_HOOK.name, _register_hook(BUILTIN_HOOK.value)),
        Replace(*COPY_STREAMS, None),
        # Statistics of times, which C++ has for the CPU and CUDA only, and warns.
        Replace(torch.distributed.Logger, "set_runtime_stats_and_log", lambda logger: None),
    ]


def _verify(original: Callable[..., Any]) -> Callable[..., Any]:
    """Return `verify_params_across_processes`, with its requests and without its comparison of values."""

    def verify(group: Any, parameters: list[torch.Tensor], logger: Any = None) -> None:
        if not any(is_virtual(parameter) and parameter.is_cuda for parameter in parameters):
            original(group, parameters, logger)
            return
        Reading.by_reducer = True
        update_reading(storages())
        count = torch.tensor([len(parameters)], device="cuda")
        # Nobody reads the numbers of all ranks, which would take a third of the time of this check.
        known_values.forget(count)
        counts = [torch.empty_like(count) for _ in range(group.size())]
        group.allgather([counts], [count]).wait()
        sizes_and_strides = [number for tensor in parameters for number in (*tensor.shape, *tensor.stride())]
        group.broadcast([torch.tensor(sizes_and_strides, dtype=torch.int64, device="cuda")]).wait()

    return verify


def _rebuild(original: Callable[..., Any], runner: PlanRunner) -> Callable[..., Any]:
    """Return `Reducer._rebuild_buckets`: rank 0 sends the bucket of each parameter, which are those of this rank."""

    def rebuild(reducer: Any) -> Any:
        with _values_of_this_rank(runner):
            return original(reducer)

    return rebuild


def _register_hook(original: Callable[..., Any]) -> Callable[..., Any]:
    """Return `_register_builtin_comm_hook`, which registers the hook of Python that requests the same."""

    def register(model: Any, hook_type: Any) -> None:
        if not is_ours(model.process_group):
            original(model, hook_type)
            return
        from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

        compresses = hook_type == torch.distributed.BuiltinCommHookType.FP16_COMPRESS
        hook = default_hooks.fp16_compress_hook if compresses else default_hooks.allreduce_hook
        model.register_comm_hook(model.process_group, hook)

    return register


@contextmanager
def _values_of_this_rank(runner: PlanRunner) -> Iterator[None]:
    runner.keeps_real_targets = True
    try:
        yield
    finally:
        runner.keeps_real_targets = False
