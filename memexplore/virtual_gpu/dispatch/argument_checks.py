"""Checks of arguments that CUDA's kernels make and torch's fake kernels leave out.

In: an op and its arguments. Out: nothing, or the RuntimeError of torch.
"""

from __future__ import annotations

from typing import Any

import torch

from memexplore.torch_internals.dispatch import schema_of

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
_LEAKY_RELU_BACKWARD = torch.ops.aten.leaky_relu_backward.default
_NEGATIVE_SLOPE = (
    "In-place leakyReLu backward calculation is triggered with a negative slope which is not supported. This is caused "
    "by calling in-place forward function with a negative slope, please call out-of-place version instead. File an "
    "issue at https://github.com/pytorch/pytorch if you do require supporting in-place leakRelu backward calculation "
    "with negative slope"
)
"""ATen/native/Activation.cpp."""


def check(func: Any, args: Any) -> None:
    """Raise RuntimeError for arguments that the op refuses on every device."""
    if func is _LEAKY_RELU_BACKWARD:
        if args[3] and args[2] < 0:
            raise RuntimeError(_NEGATIVE_SLOPE)
    elif args and schema_of(func).name.removeprefix("aten::") in _REFUSE_OVERLAP and _overlaps(args[0]):
        raise RuntimeError(_OVERLAP)


def _overlaps(tensor: torch.Tensor) -> bool:
    return tensor.numel() > 0 and any(
        stride == 0 and size > 1 for size, stride in zip(tensor.shape, tensor.stride(), strict=True)
    )
