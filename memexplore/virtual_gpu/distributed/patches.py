"""All patches of `torch.distributed` while a virtual GPU is on."""

from __future__ import annotations

from typing import Any

import torch

from memexplore.torch_internals.distributed import ACCELERATOR, AVAILABLE
from memexplore.virtual_gpu.dispatch.runner import PlanRunner
from memexplore.virtual_gpu.distributed import collectives, data_parallel, groups
from memexplore.virtual_gpu.patches.install import Patch, Replace


def patches(runner: PlanRunner) -> list[Patch]:
    """Return the patches of process groups, collectives and DistributedDataParallel."""
    if not AVAILABLE:
        return []
    return [
        Replace(ACCELERATOR.owner, ACCELERATOR.name, _accelerator),
        *groups.patches(lambda: None),
        *collectives.patches(),
        *data_parallel.patches(runner),
    ]


def _accelerator(check: Any = None) -> torch.device:
    return torch.device("cuda")
