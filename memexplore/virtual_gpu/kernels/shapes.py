"""Small words of the kernel tables: shapes, sizes in bytes, arguments."""

from __future__ import annotations

import math
from typing import Any

import torch

from memexplore.virtual_gpu.dispatch.plans import Free, New, Output, Scratch, Wanted

Requests = list[Scratch | Wanted | Output | Free]
"""What an op asks of the allocator, in order."""


def new(shape: tuple[int, ...], dtype: torch.dtype, order: tuple[int, ...] | None = None, host: bool = False) -> New:
    """Memory of its own, contiguous in the order of dimensions that is given."""
    strides = [0] * len(shape)
    step = 1
    for dim in reversed(order or range(len(shape))):
        strides[dim] = step
        step *= max(shape[dim], 1)
    return New(shape, tuple(strides), 0, dtype, math.prod(shape) * dtype.itemsize, host)


def like(tensor: torch.Tensor, width: int | None = None) -> New:
    """`empty_like`: the order of dimensions in memory is kept."""
    order = tuple(sorted(range(tensor.dim()), key=lambda dim: (-tensor.stride()[dim], dim)))
    shape = (*tensor.shape[:-1], width if width is not None else tensor.shape[-1])
    return new(shape, tensor.dtype, order)


def contiguous(tensor: torch.Tensor, order: tuple[int, ...]) -> bool:
    """Whether a tensor is contiguous once its dimensions are put in an order."""
    step = 1
    for dim in reversed(order):
        if tensor.shape[dim] != 1 and tensor.stride(dim) != step:
            return False
        step *= tensor.shape[dim]
    return True


def places(outputs: list[Any]) -> list[Output]:
    """The requests of all outputs that have memory of their own, in order."""
    return [Output(index) for index, output in enumerate(outputs) if type(output) is New]


def nbytes(tensor: torch.Tensor, dtype: torch.dtype | None = None) -> int:
    """What a tensor takes, in its own type or another."""
    return tensor.numel() * (dtype or tensor.dtype).itemsize


def given(args: Any, kwargs: Any, position: int, name: str, default: Any = None) -> Any:
    """An argument of an op, given by position or by name."""
    return args[position] if len(args) > position else kwargs.get(name, default)


def accumulator(dtype: torch.dtype) -> int:
    """Bytes in which sums of a type are kept: float for half precision, 64 bits for integers."""
    if dtype in (torch.float16, torch.bfloat16):
        return 4
    return dtype.itemsize if dtype.is_floating_point or dtype.is_complex else 8
