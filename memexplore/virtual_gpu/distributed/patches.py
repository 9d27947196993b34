"""All patches of `torch.distributed` while a virtual GPU is on."""

from __future__ import annotations

from typing import Any

import torch

from memexplore.torch_internals.distributed import ACCELERATOR, AVAILABLE
from memexplore.virtual_gpu.dispatch.runner import PlanRunner
from memexplore.virtual_gpu.distributed import data_parallel, groups, works
from memexplore.virtual_gpu.patches import install
from memexplore.virtual_gpu.patches.install import Patch, Replace


def patches(runner: PlanRunner) -> list[Patch]:
    """Return the patches of process groups, collectives and DistributedDataParallel."""
    if not AVAILABLE:
        return []
    dtensors = _DTensorPatches()
    return [
        Replace(ACCELERATOR.owner, ACCELERATOR.name, _accelerator),
        *groups.patches(dtensors.install),
        *works.patches(),
        *data_parallel.patches(runner),
        *(dtensors.patches() if torch.distributed.is_initialized() else []),
    ]


class _DTensorPatches:
    """The patches of DTensor, which are made at most once for a block: importing DTensor takes 0.5 s."""

    def __init__(self) -> None:
        self._made = False

    def patches(self) -> list[Patch]:
        """Return the patches, and remember that they are made."""
        from memexplore.virtual_gpu.distributed import dtensor

        self._made = True
        return dtensor.patches()

    def install(self) -> None:
        """Install the patches for the running block."""
        if not self._made:
            install.add(self.patches())


def _accelerator(check: Any = None) -> torch.device:
    return torch.device("cuda")
