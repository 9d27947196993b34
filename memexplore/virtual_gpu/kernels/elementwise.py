"""Memory of elementwise, padding, interpolation and fused optimizer kernels, if it is more than the outputs.

In: the op's arguments. Out: `Requests` or `Plan`, as table.py says. Sources are below aten/src/ATen/native.
"""

from __future__ import annotations

from typing import Any

import torch

from memexplore.virtual_gpu.kernels.plan import Constant, Free, Plan, Requests, Scratch
from memexplore.virtual_gpu.kernels.shapes import accumulator_bytes, argument, nbytes, new_outputs

_aten = torch.ops.aten


def power_of_number(args: Any, kwargs: Any, outputs: list[Any]) -> Requests | None:
    """A number to the power of a tensor: the number becomes a tensor on the device (pow_Scalar_out in Pow.cpp).

    8 bytes for an int as recorded with torch 2.6; c10's scalar_to_tensor (ATen/ScalarOps.h) makes int64, float64,
    complex128 or bool of it.
    """
    base = args[0]
    return None if base == 1 else [*new_outputs(outputs), Scratch({bool: 1, complex: 16}.get(type(base), 8))]


def reflection_pad(args: Any, kwargs: Any, outputs: list[Any]) -> Requests | None:
    """A copy of non-contiguous input, after the result: cuda/ReflectionPad.cu, as recorded with torch 2.3 and 2.5."""
    return None if args[0].is_contiguous() else [*new_outputs(outputs), Scratch(nbytes(args[0]))]


def upsample_nearest3d(args: Any, kwargs: Any, outputs: list[Any]) -> Requests | None:
    """The kernel does not support channels_last_3d and works on copies: cuda/UpSampleNearest3d.cu.

    As recorded with torch 2.3.
    """
    source, result = args[0], outputs[0]
    channels_last = result.stride[1] == 1 and result.shape[1] != 1
    copies: Requests = [Scratch(result.size)] if channels_last else []
    if not source.is_contiguous():
        copies.append(Scratch(nbytes(source)))
    return [*new_outputs(outputs), *copies] if copies else None


def softmax_backward(args: Any, kwargs: Any, outputs: list[Any]) -> Requests | None:
    """The product of gradient and result, after the gradient of the input: softmax_backward_cuda_out in SoftMax.cu.

    As measured with torch 2.11 on an H100.
    """
    gradient, result = args[:2]
    if not gradient.numel():
        return None
    dtype = torch.promote_types(gradient.dtype, result.dtype)
    return [*new_outputs(outputs), Scratch(gradient.numel() * dtype.itemsize)]


def renorm(args: Any, kwargs: Any, outputs: list[Any]) -> Requests:
    """The norm of each slice, after the result: renorm_out in Normalization.cpp; of half precision in float32."""
    source, dim = args[0], args[2]
    each = source.shape[dim]
    item = accumulator_bytes(source.dtype)
    further: Requests = [Scratch(each * item)]
    if item != source.dtype.itemsize:
        further.append(Scratch(each * source.dtype.itemsize))
    return [*new_outputs(outputs), *further]


def unfold_backward(args: Any, kwargs: Any, outputs: list[Any]) -> Requests | None:
    """The positions along the dimension where windows overlap: cuda/UnfoldBackwardKernel.cu."""
    _, shape, dim, size, step = args[:5]
    if step >= size or not shape:
        return None
    return [*new_outputs(outputs), Scratch(8 * shape[dim])]


def histogram(args: Any, kwargs: Any, outputs: list[Any]) -> Requests | None:
    """histc without limits reads the smallest and the largest value: _histc_cuda in cuda/SummaryOps.cu."""
    source = args[0]
    if not source.numel() or argument(args, kwargs, 2, "min", 0) != argument(args, kwargs, 3, "max", 0):
        return None
    item = source.dtype.itemsize
    return [*new_outputs(outputs), Scratch(item), Free(0), Scratch(item), Free(1)]


def fused_sgd(args: Any, kwargs: Any) -> Plan:
    """No outputs and no requests: cuda/FusedSgdKernel.cu. torch has no fake kernel for it."""
    return Plan([Constant(None)], None)


REQUESTS: list[tuple[Any, str, list[Any]]] = [
    (power_of_number, "Pow.cpp", [_aten.pow.Scalar]),
    (
        reflection_pad,
        "cuda/ReflectionPad.cu",
        [
            *(_aten.reflection_pad1d.default, _aten.reflection_pad1d_backward.default),
            *(_aten.reflection_pad2d.default, _aten.reflection_pad2d_backward.default),
            *(_aten.reflection_pad3d.default, _aten.reflection_pad3d_backward.default),
        ],
    ),
    (
        upsample_nearest3d,
        "cuda/UpSampleNearest3d.cu",
        [_aten.upsample_nearest3d.default, _aten._upsample_nearest_exact3d.default],
    ),
    (histogram, "cuda/SummaryOps.cu", [_aten.histc.default]),
    (renorm, "Normalization.cpp", [_aten.renorm.default]),
    (unfold_backward, "UnfoldBackward.cpp", [_aten.unfold_backward.default]),
]
"""Rows of kind REQUESTS for the table of kernels."""
