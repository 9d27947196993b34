"""Scaled dot-product attention: which kernel a CUDA build takes, and what leads to it.

Source of the choice: transformers/cuda/sdp_utils.cpp (select_sdp_backend and its checks) and
transformers/sdp_utils_cpp.h; of what leads to and from the kernels: transformers/attention.cpp, all below
aten/src/ATen/native.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Callable
from typing import NamedTuple

import torch

from memexplore.torch_internals.dispatch import sdp_priority_order
from memexplore.virtual_gpu.kernels import cuda_build

_aten = torch.ops.aten
_HALF = (torch.float16, torch.bfloat16)


class Kernel(enum.IntEnum):
    """The numbers of `torch.nn.attention.SDPBackend`."""

    MATH = 0
    FLASH = 1
    EFFICIENT = 2
    CUDNN = 3


class Call(NamedTuple):
    """The arguments that the choice depends on."""

    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    mask: torch.Tensor | None
    dropout: float
    causal: bool
    grouped: bool

    @property
    def trains(self) -> bool:
        """Whether autograd will want the log-sum-exp."""
        return torch.is_grad_enabled() and any(tensor.requires_grad for tensor in self[:3])


def choose(call: Call) -> Kernel:
    """The kernel that a CUDA build would run, by card, types, shapes, mask, torch release and the user's switches.

    Raises RuntimeError, in PyTorch's words, where the user allowed none that can.
    """
    for kernel in _order():
        if _CHECKS[kernel](call):
            return kernel
    raise RuntimeError("No available kernel. Aborting execution.")


def _order() -> list[Kernel]:
    chosen = [Kernel(number) for number in sdp_priority_order() if number in list(Kernel)]
    default = [Kernel.FLASH, Kernel.EFFICIENT, Kernel.MATH, Kernel.CUDNN]
    ours = cuda_build.current()
    # check_prefer_cudnn_attention: releases whose wheels bring a cuDNN that it trusts (9.10 and, from 2.11 on, 9.19).
    trusted = (2, 8) <= ours.release <= (2, 9) or ours.release >= (2, 11)
    if chosen == default and trusted and ours.compute_capability[0] in (9, 10):
        return [Kernel.CUDNN, Kernel.FLASH, Kernel.EFFICIENT, Kernel.MATH]
    return chosen


def _shapes_fit(call: Call, *, grouping: bool) -> bool:
    query, key, value = call[:3]
    if not query.dim() == key.dim() == value.dim() == 4:
        return False
    if not query.shape[0] == key.shape[0] == value.shape[0]:
        return False
    if 0 in (query.shape[-2], key.shape[-2], value.shape[-2]):
        return False
    if call.grouped and grouping:
        heads = key.shape[1]
        return heads > 0 and heads == value.shape[1] and query.shape[1] % heads == 0
    return query.shape[1] == key.shape[1] == value.shape[1]


def _last_is_dense(call: Call, *, single: bool) -> bool:
    """The last dimension has stride 1; `single` allows any stride where its extent is 1."""
    mask = () if call.mask is None else (call.mask,)
    return all(tensor.stride(-1) == 1 or (single and tensor.shape[-1] == 1) for tensor in (*call[:3], *mask))


def _same_type(call: Call, types: tuple[torch.dtype, ...]) -> bool:
    query, key, value = call[:3]
    return query.dtype is key.dtype is value.dtype and query.dtype in types


def _half_types() -> tuple[torch.dtype, ...]:
    return _HALF if cuda_build.current().compute_capability >= (8, 0) else (torch.float16,)


def _flash(call: Call) -> bool:
    if not torch.backends.cuda.flash_sdp_enabled() or call.mask is not None:
        return False
    query, key, value = call[:3]
    width = query.shape[-1]
    capability = cuda_build.current().compute_capability
    if not width == key.shape[-1] == value.shape[-1] or width > 256 or not (8, 0) <= capability <= (12, 1):
        return False
    small = (8, 6) <= capability <= (8, 9) or capability >= (12, 0)
    wanted = any(tensor.requires_grad for tensor in call[:3])
    if small and wanted and not (width <= 192 or (call.dropout == 0 and width > 224)):
        return False
    if call.causal and query.shape[-2] != key.shape[-2]:
        return False
    return _same_type(call, _half_types()) and _shapes_fit(call, grouping=True) and _last_is_dense(call, single=True)


def _alignment(dtype: torch.dtype) -> int:
    """minimum_gemm_alignment: elements that the head dimension must be a multiple of."""
    major = cuda_build.current().compute_capability[0]
    half = dtype in _HALF
    most = 4 if major >= 8 else 1
    if major >= 8 or (major >= 7 and half):
        most = max(most, 128 // (16 if half else 32))
    return most


def _efficient(call: Call) -> bool:
    if not torch.backends.cuda.mem_efficient_sdp_enabled():
        return False
    query, key, value = call[:3]
    ours = cuda_build.current()
    types = (*_half_types(), torch.float32)
    if not _same_type(call, types) or not _shapes_fit(call, grouping=ours.release >= (2, 15)):
        return False
    alignment = _alignment(query.dtype)
    if query.shape[-1] != key.shape[-1] or 0 in (query.shape[-1], value.shape[-1]):
        return False
    if query.shape[-1] % alignment or value.shape[-1] % alignment:
        return False
    return _last_is_dense(call, single=False)


def _cudnn(call: Call) -> bool:
    if not torch.backends.cuda.cudnn_sdp_enabled():
        return False
    query, key, value, mask = call[:4]
    capability = cuda_build.current().compute_capability
    if capability < (8, 0) or not _same_type(call, _half_types()) or call.dropout * 16 % 1:
        return False
    if torch.are_deterministic_algorithms_enabled() and not torch.is_deterministic_algorithms_warn_only_enabled():
        return False
    if mask is not None and not _mask_fits(call, mask):
        return False
    if not _shapes_fit(call, grouping=True) or not _last_is_dense(call, single=True):
        return False
    widths = query.shape[-1], value.shape[-1]
    if max(widths) > 128 or any(width % 8 for width in widths):
        return False
    return key.shape[-2] != 1 and not (call.dropout and query.shape[-2] == 1)


def _mask_fits(call: Call, mask: torch.Tensor) -> bool:
    if mask.requires_grad or mask.dim() not in (2, 4):
        return False
    full = (call.query.shape[0], call.query.shape[1], call.query.shape[2], call.key.shape[2])
    return all(size in (1, whole) for size, whole in zip(reversed(mask.shape), reversed(full), strict=False))


_CHECKS: dict[Kernel, Callable[[Call], bool]] = {
    Kernel.FLASH: _flash,
    Kernel.EFFICIENT: _efficient,
    Kernel.CUDNN: _cudnn,
    Kernel.MATH: lambda call: torch.backends.cuda.math_sdp_enabled(),
}


# --- what leads to the kernels: transformers/attention.cpp ----------------------------------------------------------


def scaled_dot_product_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None = None,
    dropout: float = 0.0,
    causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> torch.Tensor:
    """The composite op as it runs on CUDA."""
    call = Call(query, key, value, mask, dropout, causal, enable_gqa)
    kernel = choose(call)
    if mask is not None and mask.dtype is torch.bool:
        mask = _as_bias(mask, query.dtype)
    if kernel is Kernel.FLASH:
        width = query.shape[-1]
        scale = 1 / math.sqrt(width) if scale is None else scale
        query, key, value = (_padded(tensor, 8) for tensor in (query, key, value))
        result = _aten._scaled_dot_product_flash_attention(query, key, value, dropout, causal, False, scale=scale)[0]
        return result if result.shape[-1] == width else result[..., :width]
    if kernel is Kernel.EFFICIENT:
        if mask is not None:
            mask = _aligned(mask).expand(query.shape[0], query.shape[1], query.shape[2], key.shape[2])
        return _aten._scaled_dot_product_efficient_attention(
            query, key, value, mask, call.trains, dropout, causal, scale=scale
        )[0]
    if kernel is Kernel.CUDNN:
        return _aten._scaled_dot_product_cudnn_attention(
            query, key, value, mask, call.trains, dropout, causal, False, scale=scale
        )[0]
    return _math(query, key, value, mask, dropout, causal, scale, enable_gqa)


def _as_bias(mask: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """convert_boolean_attn_mask: 0 where the mask holds, -inf elsewhere."""
    return torch.where(mask.logical_not(), float("-inf"), torch.scalar_tensor(0.0, dtype=dtype, device=mask.device))


def _padded(tensor: torch.Tensor, multiple: int) -> torch.Tensor:
    missing = -tensor.shape[-1] % multiple
    return _aten.constant_pad_nd(tensor, [0, missing], 0) if missing else tensor


def _aligned(mask: torch.Tensor) -> torch.Tensor:
    """preprocess_mask: rows that start at multiples of 8 elements; padded (by at least 1) and cut again where not."""
    if mask.stride(-1) == 1 and all(step % 8 == 0 for step in mask.stride()[:-1]):
        return mask
    width = mask.shape[-1]
    return _aten.constant_pad_nd(mask, [0, 8 - width % 8], 0)[..., :width]


def _math(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    dropout: float,
    causal: bool,
    scale: float | None,
    grouped: bool,
) -> torch.Tensor:
    """_scaled_dot_product_attention_math: half precision is computed in float32 from torch 2.5 on."""
    release = cuda_build.current().release
    given = query.dtype
    if release >= (2, 5) and given in _HALF and not torch.backends.cuda.fp16_bf16_reduction_math_sdp_allowed():
        query, key, value = query.float(), key.float(), value.float()
    root = math.sqrt(abs(scale) if scale is not None else 1 / math.sqrt(query.shape[-1]))
    query = query * (-root if scale is not None and scale < 0 else root)
    if causal:
        mask = torch.ones(query.shape[-2], key.shape[-2], dtype=torch.bool, device=query.device).tril()
        mask = _as_bias(mask, query.dtype)
    if grouped:
        times = query.shape[-3] // key.shape[-3], query.shape[-3] // value.shape[-3]
        key, value = key.repeat_interleave(times[0], -3), value.repeat_interleave(times[1], -3)
    weights = torch.matmul(query, key.transpose(-2, -1) * root)
    if mask is not None:
        weights = weights.add_(mask.to(weights.dtype) if mask.dtype is not weights.dtype else mask)
    weights = _aten._safe_softmax(weights, -1) if release >= (2, 5) else torch.softmax(weights, -1)
    if dropout > 0:
        weights = torch.dropout(weights, dropout, True)
    return torch.matmul(weights, value).to(given)
