"""Works: what `Work.wait` releases, for collectives that ran on virtual tensors (kernels/collectives.py)."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from memexplore.torch_internals.distributed import WAIT, c10d
from memexplore.virtual_gpu.kernels import collective_values, collectives
from memexplore.virtual_gpu.patches.install import Patch, Replace

_NCCL = (2, 30, 7)
"""Release of NCCL in the CUDA build of torch 2.15, as `torch.cuda.nccl.version()` reports it."""

_POSITIONS = {"all_reduce": 1, "reduce": 2, "reduce_scatter": 2, "reduce_scatter_tensor": 2, "reduce_scatter_single": 2}
"""Functions that reduce, and the position of their argument `op`."""


def patches() -> list[Patch]:
    """Return the patches of works and of NCCL's release."""
    return [
        Replace(WAIT.owner, WAIT.name, _waiting(WAIT.value)),
        Replace(torch.cuda.nccl, "version", lambda: _NCCL),
        *(
            Replace(module, name, _naming(getattr(torch.distributed, name), position))
            for name, position in _POSITIONS.items()
            if hasattr(torch.distributed, name)
            for module in (torch.distributed, c10d)
        ),
    ]


def _naming(original: Callable[..., Any], position: int) -> Callable[..., Any]:
    """Return a collective that says which reduction it makes, the argument `op` or that at a position."""

    @functools.wraps(original)
    def collective(*args: Any, **kwargs: Any) -> Any:
        op = kwargs.get("op", args[position] if len(args) > position else "sum")
        before = collective_values.Reduction.op
        collective_values.Reduction.op = str(op).rpartition(".")[2].lower()
        try:
            return original(*args, **kwargs)
        finally:
            collective_values.Reduction.op = before

    return collective


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
