"""All patches of `torch.distributed` while a virtual GPU is on."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from memexplore.torch_internals.distributed import ACCELERATOR, AVAILABLE, c10d
from memexplore.torch_internals.sharded import FSDP2, ZERO
from memexplore.torch_internals.state import compiler_is_imported, compiler_rules
from memexplore.virtual_gpu.dispatch.runner import PlanRunner
from memexplore.virtual_gpu.distributed import (
    accelerate_state,
    data_parallel,
    deepspeed_kernels,
    groups,
    late_imports,
    objects,
    remote_calls,
    sharded_states,
    shards,
    spawned,
    stores,
    works,
)
from memexplore.virtual_gpu.patches import install
from memexplore.virtual_gpu.patches.install import Patch, Replace


def patches(runner: PlanRunner) -> list[Patch]:
    """Return the patches of process groups, collectives and DistributedDataParallel."""
    if not AVAILABLE:
        return []
    dtensors, rules = _Once(_of_dtensor), _Once(_of_compiler_rules)
    makes = {**deepspeed_kernels.PATCHES, ZERO: sharded_states.patches, FSDP2: shards.patches}
    imported = {name: _Once(make) for name, make in makes.items()}

    def on_group() -> None:
        dtensors.install()
        for once in imported.values():
            once.install()

    modules = (torch.distributed, c10d, torch.distributed.device_mesh)
    start = _starting(torch.distributed.init_process_group, rules)
    return [
        *(Replace(module, "init_process_group", start) for module in modules),
        Replace(ACCELERATOR.owner, ACCELERATOR.name, _accelerator),
        *groups.patches(on_group),
        late_imports.patch({name: once.install for name, once in imported.items()}),
        *remote_calls.patches(),
        accelerate_state.patch(),
        *works.patches(),
        *objects.patches(),
        *spawned.patches(),
        *stores.patches(),
        *data_parallel.patches(runner),
        *(dtensors.patches() if torch.distributed.is_initialized() else []),
    ]


def _starting(original: Callable[..., Any], rules: _Once) -> Callable[..., Any]:
    @functools.wraps(original)
    def init_process_group(*args: Any, **kwargs: Any) -> Any:
        if compiler_is_imported():
            rules.install()
        return original(*args, **kwargs)

    return init_process_group


def _of_dtensor() -> list[Patch]:
    # Importing DTensor takes 0.5 s, and the others together 0.3 s.
    from memexplore.virtual_gpu.distributed import checkpoints, dtensor, flat_states, pipelines, sharded_tensors

    return [
        *dtensor.patches(),
        *checkpoints.patches(),
        *flat_states.patches(),
        *sharded_tensors.patches(),
        *pipelines.patches(),
    ]


def _of_compiler_rules() -> list[Patch]:
    return [Replace(compiler_rules(), "clear_lru_cache", lambda: None)]


class _Once:
    """Patches that are installed at most once for a block, when it needs them and there are any."""

    def __init__(self, make: Callable[[], list[Patch]]) -> None:
        self._make = make
        self._installed = False

    def patches(self) -> list[Patch]:
        """Return the patches, for a caller that installs them."""
        patches = self._make()
        self._installed = bool(patches)
        return patches

    def install(self) -> None:
        """Install the patches for the running block, unless they are installed; again after an interrupt."""
        if not self._installed:
            patches = self._make()
            install.add(patches)
            self._installed = bool(patches)


def _accelerator(check: Any = None) -> torch.device:
    return torch.device("cuda")
