"""Helpers of the rules: planned outputs of given shapes, sizes in bytes, arguments by position or name."""

from __future__ import annotations

import math
from typing import Any

import torch

from memexplore.virtual_gpu.kernels.plan import NewTensor, Output, PlannedOutput


def new(
    shape: tuple[int, ...], dtype: torch.dtype, order: tuple[int, ...] | None = None, host: bool = False
) -> NewTensor:
    """Return a planned output without gaps, its dimensions laid out in `order` (outermost first; default: as given)."""
    strides = [0] * len(shape)
    step = 1
    for dim in reversed(order or range(len(shape))):
        strides[dim] = step
        step *= max(shape[dim], 1)
    return NewTensor(shape, tuple(strides), 0, dtype, math.prod(shape) * dtype.itemsize, host)


def like(tensor: torch.Tensor, width: int | None = None) -> NewTensor:
    """Return the planned output of `empty_like`, which keeps the order of dimensions in memory.

    `width` replaces the extent of the last dimension.
    """
    order = tuple(sorted(range(tensor.dim()), key=lambda dim: (-tensor.stride()[dim], dim)))
    shape = tuple(tensor.shape) if width is None else (*tensor.shape[:-1], width)
    return new(shape, tensor.dtype, order)


def is_contiguous(tensor: torch.Tensor, order: tuple[int, ...]) -> bool:
    """Return whether a tensor is contiguous after its dimensions are permuted to `order`."""
    step = 1
    for dim in reversed(order):
        if tensor.shape[dim] != 1 and tensor.stride(dim) != step:
            return False
        step *= tensor.shape[dim]
    return True


def new_outputs(outputs: list[PlannedOutput]) -> list[Any]:
    """Return the requests for the storages of all new outputs, in order."""
    return [Output(index) for index, output in enumerate(outputs) if type(output) is NewTensor]


def nbytes(tensor: torch.Tensor, dtype: torch.dtype | None = None) -> int:
    """Return the bytes of a tensor's elements, in its own dtype or another."""
    return tensor.numel() * (dtype or tensor.dtype).itemsize


def argument(args: Any, kwargs: Any, position: int, name: str, default: Any = None) -> Any:
    """Return an op's argument, passed by position or by name."""
    return args[position] if len(args) > position else kwargs.get(name, default)


def accumulator_bytes(dtype: torch.dtype) -> int:
    """Return the bytes of the type in which CUDA sums a dtype: float32 for half precision, int64 for integers."""
    if dtype in (torch.float16, torch.bfloat16):
        return 4
    return dtype.itemsize if dtype.is_floating_point or dtype.is_complex else 8
