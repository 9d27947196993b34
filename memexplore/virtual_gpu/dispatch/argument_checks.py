"""Refuse arguments as CUDA does: tensors of two devices in one op, and what torch's fake kernels do not check."""

from __future__ import annotations

from typing import Any

import torch

from memexplore.torch_internals.dispatch import schema_of
from memexplore.torch_internals.tensors import base_of
from memexplore.virtual_gpu.kernels import table
from memexplore.virtual_gpu.kernels.table import Kind
from memexplore.virtual_gpu.tensors.tensor import is_on_gpu

_aten = torch.ops.aten

_COPIES = frozenset(
    {
        _aten.copy_.default,
        _aten.copy.default,
        _aten._to_copy.default,
        _aten._copy_from.default,
        _aten._foreach_copy_.default,
        _aten.set_.source_Tensor,
        _aten.equal.default,
    }
)
# Ops that accept further tensors on the CPU if the first is on the GPU.
_ACCEPT_CPU_TENSORS = frozenset(
    {
        _aten.index.Tensor,
        _aten.index_put.default,
        _aten.index_put_.default,
        _aten._index_put_impl_.default,
        _aten._pack_padded_sequence.default,
        _aten._ctc_loss.Tensor,
        _aten._ctc_loss_backward.Tensor,
        _aten._cudnn_ctc_loss.default,
        _aten._cudnn_ctc_loss.Tensor,
        _aten.tensor_split.tensor_indices_or_sections,
    }
)


def check_devices(func: Any, tensors: list[torch.Tensor]) -> None:
    """Raise RuntimeError if an op gets tensors of both devices and CUDA does not accept them."""
    on_gpu = on_cpu = False
    for tensor in tensors:
        if is_on_gpu(tensor):
            on_gpu = True
        elif tensor.dim() and not is_managed(tensor):
            on_cpu = True
    if not (on_gpu and on_cpu) or func in _COPIES:
        return
    if func in _ACCEPT_CPU_TENSORS and is_on_gpu(tensors[0]):
        return
    raise device_error(func, tensors)


def broadcast_error(tensors: list[torch.Tensor]) -> RuntimeError | None:
    """Return the error of operands that do not broadcast in CUDA's words, None if they do.

    As `infer_size` in aten/src/ATen/ExpandUtils.cpp, by which TensorIterator takes one operand after the other.
    """
    common: list[int] = []
    for tensor in tensors:
        dims = max(len(common), tensor.dim())
        first = [1] * (dims - len(common)) + common
        second = [1] * (dims - tensor.dim()) + list(tensor.shape)
        for dim in reversed(range(dims)):
            if 1 not in (first[dim], second[dim]) and first[dim] != second[dim]:
                return RuntimeError(
                    f"The size of tensor a ({first[dim]}) must match the size of tensor b ({second[dim]}) "
                    f"at non-singleton dimension {dim}"
                )
        common = [two if one == 1 else one for one, two in zip(first, second, strict=True)]
    return None


def is_managed(tensor: torch.Tensor) -> bool:
    """Return whether a tensor is in CUDA's managed memory, as the states of bitsandbytes' paged optimizers are."""
    return bool(getattr(tensor, "is_paged", False))


def device_error(func: Any, tensors: list[torch.Tensor]) -> RuntimeError:
    """Return the error for tensors of both devices, which says what to move."""
    gpu = [tensor for tensor in tensors if is_on_gpu(tensor)]
    cpu = [tensor for tensor in tensors if not is_on_gpu(tensor) and tensor.dim()]
    weight = next((tensor for tensor in cpu if _is_parameter(tensor)), None)
    if weight is not None:
        advice = f"a parameter of shape {_shape(weight)} is on the CPU: move the model with model.to('cuda')"
    elif any(map(_is_parameter, gpu)) and cpu:
        advice = (
            f"the model is on the GPU and its data of shape {_shape(cpu[0])} is not: move the data with .to('cuda')"
        )
    elif cpu:
        advice = f"a tensor of shape {_shape(cpu[0])} is on the CPU: move it with .to('cuda')"
    else:
        advice = "move the model and its data to the same device with .to('cuda')"
    return RuntimeError(
        "Expected all tensors to be on the same device, but found at least two devices, cuda:0 and cpu! "
        f"In {str(func).split('.')[1]}, {advice}"
    )


def _is_parameter(tensor: torch.Tensor) -> bool:
    base = tensor if base_of(tensor) is None else base_of(tensor)
    return isinstance(base, torch.nn.Parameter)


def _shape(tensor: torch.Tensor) -> tuple[int, ...]:
    base = tensor if base_of(tensor) is None else base_of(tensor)
    return tuple(base.shape)


_OVERLAP = (
    "unsupported operation: more than one element of the written-to tensor refers to a single memory location. Please "
    "clone() the tensor before performing the operation."
)
"""`assert_no_internal_overlap` in ATen/MemoryOverlap.cpp, which TensorIterator calls."""
# Those of torch 2.13 that raise the error on the CPU, found by calling each on an expanded tensor; others, such as
# `fill_`, may write one place several times.
_REFUSE_OVERLAP = frozenset(
    "lt_ gt_ le_ ge_ ne_ eq_ sub_ add_ mul_ div_ remainder_ fmod_ pow_ floor_divide_ lerp_ addcmul_ addcdiv_ copysign_ "
    "heaviside_ hypot_ nextafter_ gcd_ lcm_ igamma_ igammac_ xlogy_ ldexp_ atan2_ clamp_ clamp_max_ clamp_min_ "
    "bitwise_and_ bitwise_or_ bitwise_xor_ bitwise_not_ bitwise_left_shift_ bitwise_right_shift_ __ilshift__ "
    "__irshift__ logical_and_ logical_or_ logical_xor_ logical_not_ copy_ normal_ uniform_ random_ bernoulli_ "
    "exponential_ cauchy_ geometric_ log_normal_ cumsum_ cumprod_ renorm_ put_ scatter_ scatter_add_ scatter_reduce_ "
    "masked_scatter_ index_add_ index_copy_ abs_ acos_ acosh_ asin_ asinh_ atan_ atanh_ ceil_ cos_ cosh_ deg2rad_ "
    "digamma_ erf_ erfc_ erfinv_ exp_ exp2_ expm1_ floor_ frac_ lgamma_ log_ log10_ log1p_ log2_ logit_ nan_to_num_ "
    "neg_ polygamma_ rad2deg_ reciprocal_ round_ rsqrt_ sgn_ sign_ sin_ sinc_ sinh_ sqrt_ square_ tan_ tanh_ trunc_ "
    "i0_ relu_ elu_ gelu_ silu_ mish_ hardsigmoid_ hardswish_ hardtanh_ leaky_relu_ sigmoid_ rrelu_with_noise_".split()
)


def check_values(func: Any, args: Any, kwargs: Any) -> None:
    """Raise the error of torch for arguments that the op refuses, and torch's fake kernels accept."""
    if args and schema_of(func).name.removeprefix("aten::") in _REFUSE_OVERLAP and _overlaps(args[0]):
        raise RuntimeError(_OVERLAP)
    refusal = table.find(func, Kind.REFUSAL)
    if refusal is not None:
        refusal(*args, **kwargs)


def _overlaps(tensor: torch.Tensor) -> bool:
    return tensor.numel() > 0 and any(
        stride == 0 and size > 1 for size, stride in zip(tensor.shape, tensor.stride(), strict=True)
    )
