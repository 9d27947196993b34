"""Works: what `Work.wait` releases, for collectives that ran on virtual tensors (kernels/collectives.py)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from memexplore.torch_internals.distributed import WAIT
from memexplore.virtual_gpu.kernels import collectives
from memexplore.virtual_gpu.patches.install import Patch, Replace

_NCCL = (2, 30, 7)
"""Release of NCCL in the CUDA build of torch 2.15, as `torch.cuda.nccl.version()` reports it."""


def patches() -> list[Patch]:
    """Return the patches of works and of NCCL's release."""
    return [
        Replace(WAIT.owner, WAIT.name, _waiting(WAIT.value)),
        Replace(torch.cuda.nccl, "version", lambda: _NCCL),
    ]


def _waiting(original: Callable[..., Any]) -> Callable[..., Any]:
    def wait(work: Any, *args: Any, **kwargs: Any) -> Any:
        result = original(work, *args, **kwargs)
        try:
            outputs = work.get_future().value()
        except RuntimeError:
            # A work of a real group without a future.
            return result
        collectives.release(outputs)
        return result

    return wait
