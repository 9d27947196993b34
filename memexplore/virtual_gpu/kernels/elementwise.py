"""Request the memory of elementwise kernels and fused optimizers, where it is more than the outputs.

Sources are below aten/src/ATen/native.
"""

from __future__ import annotations

from typing import Any

import torch

from memexplore.virtual_gpu.kernels.plan import (
    Constant,
    OpRunner,
    Plan,
    Requests,
    Scratch,
    argument,
    nbytes,
    new_outputs,
)
from memexplore.virtual_gpu.kernels.table import Kind, rule
from memexplore.virtual_gpu.tensors.tensor import is_on_gpu

_aten = torch.ops.aten


@rule(Kind.REQUESTS, "Pow.cpp", _aten.pow.Scalar)
def power_of_number(args: Any, kwargs: Any, outputs: list[Any]) -> Requests | None:
    """A number to the power of a tensor: the number becomes a tensor on the device (pow_Scalar_out in Pow.cpp).

    8 bytes for an int as recorded with torch 2.6; c10's scalar_to_tensor (ATen/ScalarOps.h) makes int64, float64,
    complex128 or bool of it.
    """
    base = args[0]
    return None if base == 1 else [*new_outputs(outputs), Scratch({bool: 1, complex: 16}.get(type(base), 8))]


@rule(Kind.REQUESTS, "UnaryOps.cpp", _aten.abs.default, _aten.angle.default)
def complex_to_real(args: Any, kwargs: Any, outputs: list[Any]) -> Requests | None:
    """abs and angle of complex values: a complex result, copied.

    Source: unary_op_impl_with_complex_to_float_out in UnaryOps.cpp.
    """
    if not args[0].dtype.is_complex or not outputs[0].size:
        return None
    return [*new_outputs(outputs), Scratch(nbytes(args[0]))]


@rule(Kind.OPS, "TensorCompare.cpp", _aten.isinf.default)
def is_infinite(runner: OpRunner, func: Any, args: Any, kwargs: Any) -> Any:
    """isinf: magnitudes, compared (TensorCompare.cpp)."""
    source = args[0]
    if not is_on_gpu(source) or not source.dtype.is_floating_point:
        return NotImplemented
    with runner:
        return _aten.eq.Scalar(_aten.abs.default(source), float("inf"))


@rule(Kind.OPS, "TensorCompare.cpp", _aten.isclose.default)
def is_close(runner: OpRunner, func: Any, args: Any, kwargs: Any) -> Any:
    """isclose: errors against the allowed ones where they are finite (TensorCompare.cpp)."""
    first, second = args[:2]
    rtol, atol = argument(args, kwargs, 2, "rtol", 1e-05), argument(args, kwargs, 3, "atol", 1e-08)
    plain = not argument(args, kwargs, 4, "equal_nan", False) and (rtol or atol)
    if not is_on_gpu(first, second) or not first.dtype.is_floating_point or not plain:
        return NotImplemented
    with runner:
        close = first.eq(second)
        scaled = second.mul(rtol)
        size = scaled.abs()
        allowed = size.add(atol)
        del size, scaled
        error = first.sub(second).abs()
        below_infinity = error.abs().ne(float("inf"))
        finite = error.eq(error).mul(below_infinity)
        del below_infinity
        return close.logical_or_(finite.logical_and_(error.le(allowed)))


@rule(Kind.REQUESTS, "TensorTransformations.h", _aten.roll.default)
def roll(args: Any, kwargs: Any, outputs: list[Any]) -> Requests | None:
    """A copy for each dimension but the last, until the end: roll_common in TensorTransformations.h."""
    count = len(argument(args, kwargs, 1, "shifts"))
    if count < 2 or not args[0].numel():
        return None
    return [*(Scratch(nbytes(args[0])) for _ in range(count - 1)), *new_outputs(outputs)]


@rule(Kind.REQUESTS, "UnfoldBackward.cpp", _aten.unfold_backward.default)
def unfold_backward(args: Any, kwargs: Any, outputs: list[Any]) -> Requests | None:
    """The positions along the dimension where windows overlap: cuda/UnfoldBackwardKernel.cu."""
    _, shape, dim, size, step = args[:5]
    if step >= size or not shape:
        return None
    return [*new_outputs(outputs), Scratch(8 * shape[dim])]


@rule(Kind.PLAN, "cuda/FusedSgdKernel.cu", _aten._fused_sgd_.default, _aten._fused_sgd_.tensor_lr)
def fused_sgd(args: Any, kwargs: Any) -> Plan:
    """No outputs and no requests: cuda/FusedSgdKernel.cu. torch has no fake kernel for it."""
    return Plan([Constant(None)], None)
