"""Request the memory of copies between CPU and GPU: temporaries for tensors that are not contiguous or change dtype.

Source: copy_requires_temporaries and copy_kernel_cuda in aten/src/ATen/native/cuda/Copy.cu; the copy of a slice of a
tensor as recorded with torch 2.5.
"""

from __future__ import annotations

import math
from typing import Any

import torch

from memexplore.virtual_gpu.kernels.plan import Free, NewTensor, Requests, Scratch, argument, nbytes, new_outputs
from memexplore.virtual_gpu.kernels.table import Kind, rule

_aten = torch.ops.aten


@rule(Kind.REQUESTS, "cuda/Copy.cu", _aten.copy_.default)
def copy_into(args: Any, kwargs: Any, outputs: list[Any]) -> Requests | None:
    """copy_."""
    target, source = args[:2]
    planned = NewTensor(tuple(target.shape), tuple(target.stride()), 0, target.dtype, nbytes(target), target.is_cpu)
    return _temporaries(planned, source, argument(args, kwargs, 2, "non_blocking", False)) or None


@rule(Kind.REQUESTS, "cuda/Copy.cu", _aten._to_copy.default)
def to_copy(args: Any, kwargs: Any, outputs: list[Any]) -> Requests | None:
    """_to_copy (`Tensor.to`, `.cuda()`, `.cpu()`): the result, then as copy_."""
    if type(outputs[0]) is not NewTensor:
        return None
    temporaries = _temporaries(outputs[0], args[0], kwargs.get("non_blocking", False))
    return [*new_outputs(outputs), *temporaries] if temporaries else None


def _temporaries(target: NewTensor, source: torch.Tensor, non_blocking: bool) -> Requests:
    from_host = source.is_cpu
    if from_host == target.host:
        return []
    stride = _expanded(source, target.shape)
    same = source.dtype is target.dtype
    # TensorIterator's `is_contiguous`: both are dense, in the same order of dimensions.
    order = tuple(sorted(range(len(stride)), key=lambda dim: -target.stride[dim]))
    if same and _dense(target.shape, target.stride, order) and _dense(target.shape, stride, order):
        return []
    count = math.prod(target.shape)
    in_order = tuple(range(len(stride)))
    if from_host:
        # A blocking copy converts the dtype on the CPU, a non-blocking one on the GPU.
        itemsize = (source if non_blocking else target).dtype.itemsize
        is_dense = _dense(target.shape, target.stride, in_order)
        return [] if is_dense and (same or not non_blocking) else [Scratch(count * itemsize)]
    copies: Requests = [Scratch(nbytes(source, target.dtype))] if non_blocking and not same else []
    if not _dense(target.shape, stride, in_order):
        copies.append(Scratch(count * (target if non_blocking else source).dtype.itemsize))
        if len(copies) > 1:
            copies.append(Free(0))
    return copies


def _expanded(source: torch.Tensor, shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return the strides of `source.expand(shape)`."""
    front = len(shape) - source.dim()
    strides = zip(source.shape, source.stride(), shape[front:], strict=True)
    return (0,) * front + tuple(0 if size == 1 != extent else stride for size, stride, extent in strides)


def _dense(shape: tuple[int, ...], stride: tuple[int, ...], order: tuple[int, ...]) -> bool:
    """Return whether a tensor has no gaps, with its dimensions in an order (outermost first)."""
    step = 1
    for dim in reversed(order):
        if shape[dim] != 1:
            if stride[dim] != step:
                return False
            step *= shape[dim]
    return True
