"""Release at `Work.wait` what collectives on virtual tensors keep (kernels/collectives.py).

Also set the values of tensors on the CPU after a reduction, which the backend `fake` leaves as they are.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from memexplore.torch_internals.distributed import SOURCE_RANK, WAIT, c10d
from memexplore.virtual_gpu.distributed import groups
from memexplore.virtual_gpu.kernels import collective_values, collectives
from memexplore.virtual_gpu.patches.install import Patch, Replace
from memexplore.virtual_gpu.tensors.tensor import is_virtual
from memexplore.virtual_gpu.values import notes

_NCCL = (2, 30, 7)
"""Release of NCCL in the CUDA build of torch 2.15, as `torch.cuda.nccl.version()` reports it."""

_IN_PLACE = frozenset(("all_reduce", "reduce"))
_POSITIONS = {"all_reduce": 1, "reduce": 2, "reduce_scatter": 2, "reduce_scatter_tensor": 2, "reduce_scatter_single": 2}
"""Functions that reduce, and the position of their argument `op`."""


def patches() -> list[Patch]:
    """Return the patches of works and of NCCL's release."""
    return [
        Replace(WAIT.owner, WAIT.name, _waiting(WAIT.value)),
        Replace(SOURCE_RANK.owner, SOURCE_RANK.name, _source_rank(SOURCE_RANK.value)),
        Replace(torch.cuda.nccl, "version", lambda: _NCCL),
        *(
            Replace(module, name, _naming(name, getattr(torch.distributed, name), position))
            for name, position in _POSITIONS.items()
            if hasattr(torch.distributed, name)
            for module in (torch.distributed, c10d)
        ),
    ]


def _naming(name: str, original: Callable[..., Any], position: int) -> Callable[..., Any]:
    """Return a collective that says which reduction it makes, the argument `op` or that at a position."""

    @functools.wraps(original)
    def collective(*args: Any, **kwargs: Any) -> Any:
        op = kwargs.get("op", args[position] if len(args) > position else "sum")
        before = collective_values.Reduction.op
        collective_values.Reduction.op = str(op).rpartition(".")[2].lower()
        try:
            work = original(*args, **kwargs)
            # Under a mode for functions of torch the function calls itself.
            if name in _IN_PLACE and not before:
                _reduce_on_cpu(
                    kwargs.get("group", args[position + 1] if len(args) > position + 1 else None), args, kwargs
                )
            return work
        finally:
            collective_values.Reduction.op = before

    return collective


def _reduce_on_cpu(group: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Reduce the values of a tensor on the CPU, as of ranks that all have the values of this rank."""
    tensor = args[0] if args else kwargs.get("tensor")
    if type(tensor) is not torch.Tensor or is_virtual(tensor) or tensor.device.type != "cpu":
        return
    if not groups.is_ours(group):
        return
    with torch.no_grad():
        collective_values.reduce_values(tensor, torch.distributed.get_world_size(group))


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


def _source_rank(original: Callable[..., Any]) -> Callable[..., Any]:
    """Return `Work._source_rank`, the sender of a `recv` from any rank: rank 0 counts as it."""

    def source_rank(work: Any) -> Any:
        try:
            return original(work)
        except RuntimeError:
            notes.assume("what is received from any rank came from rank 0")
            return 0

    return source_rank
