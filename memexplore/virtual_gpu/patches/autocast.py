"""Imitate autocast as on CUDA: PyTorch's lists of CUDA ops, its promotion rules and its cache of cast weights.

Source of the lists and rules: ATen/autocast_mode.h (`AT_FORALL_LOWER_PRECISION_FP`, `AT_FORALL_FP32`,
`AT_FORALL_FP32_SET_OPT_DTYPE`, `AT_FORALL_PROMOTE`) and ATen/autocast_mode.cpp (`cached_cast`).
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from memexplore.torch_internals.dispatch import (
    DisableTorchFunction,
    DispatchKey,
    DispatchKeySet,
    ExcludeDispatchKeyGuard,
    schema_of,
)
from memexplore.torch_internals.tensors import is_view
from memexplore.virtual_gpu.dispatch import autograd_engine
from memexplore.virtual_gpu.kernels import recurrent, table
from memexplore.virtual_gpu.patches.install import Call, Keep, Patch, Replace
from memexplore.virtual_gpu.tensors.tensor import BACKEND, is_on_gpu

_LOWER = (
    "_convolution.deprecated _convolution conv1d conv2d conv3d conv_tbc conv_transpose1d conv_transpose2d.input "
    "conv_transpose3d.input convolution prelu addmm addmv addr matmul einsum mm mv linalg_vecdot linear addbmm baddbmm "
    "bmm chain_matmul linalg_multi_dot _thnn_fused_lstm_cell _thnn_fused_gru_cell lstm_cell gru_cell rnn_tanh_cell "
    "rnn_relu_cell _scaled_dot_product_flash_attention scaled_dot_product_attention"
).split()
_FP32 = (
    "acos asin cosh erfinv exp expm1 log log10 log2 log1p reciprocal rsqrt sinh tan pow.Tensor_Scalar "
    "pow.Tensor_Tensor pow.Scalar softplus layer_norm native_layer_norm rms_norm group_norm frobenius_norm.dim "
    "nuclear_norm nuclear_norm.dim cosine_similarity poisson_nll_loss cosine_embedding_loss nll_loss nll_loss2d "
    "hinge_embedding_loss kl_div l1_loss smooth_l1_loss huber_loss mse_loss margin_ranking_loss multilabel_margin_loss "
    "soft_margin_loss triplet_margin_loss multi_margin_loss binary_cross_entropy_with_logits dist pdist cdist renorm "
    "logsumexp upsample_nearest1d _upsample_nearest_exact1d upsample_nearest2d _upsample_nearest_exact2d "
    "upsample_nearest3d _upsample_nearest_exact3d upsample_linear1d upsample_bilinear2d _upsample_bilinear2d_aa "
    "upsample_trilinear3d upsample_bicubic2d _upsample_bicubic2d_aa"
).split()
_FP32_DTYPE = (
    "prod prod.dim_int softmax.int log_softmax.int cumprod cumsum linalg_vector_norm linalg_matrix_norm "
    "linalg_matrix_norm.str_ord sum sum.dim_IntList"
).split()
_PROMOTE = (
    "addcdiv addcmul atan2 bilinear cross dot vdot grid_sampler index_put tensordot scatter_add cat stack"
).split()

# Ops that later releases added to the list (compared: the header in the wheels of 2.11, 2.13 and 2.15).
_SINCE = {torch.ops.aten.rms_norm.default: (2, 12)}
_release: tuple[int, int] = (2, 13)
"""The release whose rules apply; replaced while a virtual GPU is on."""

_registered: list[torch.library.Library] = []
_cache: dict[int, tuple[weakref.ref[Any], torch.Tensor]] = {}
"""Weight, by id, and its cast; emptied when the outermost autocast context exits."""


def _eligible(value: Any) -> bool:
    """Whether autocast casts a value: a floating-point tensor on the device that is not double."""
    return is_on_gpu(value) and value.is_floating_point() and value.dtype != torch.float64


def _cached_cast(value: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    if value.dtype is dtype:
        return value
    cacheable = (
        dtype is torch.get_autocast_dtype(BACKEND.type)
        and value.dtype is torch.float32
        and value.requires_grad
        and value.is_leaf
        and not is_view(value)
        and torch.is_autocast_cache_enabled()
    )
    if not cacheable:
        return value.to(dtype)
    entry = _cache.get(id(value))
    if entry is not None and entry[0]() is value:
        return entry[1]
    cast = value.to(dtype)
    _cache[id(value)] = (weakref.ref(value), cast)
    return cast


def _cast(value: Any, dtype: torch.dtype) -> Any:
    if isinstance(value, torch.Tensor):
        return _cached_cast(value, dtype) if _eligible(value) else value
    if isinstance(value, list | tuple):
        return type(value)(_cast(entry, dtype) for entry in value)
    return value


def _all_cast(
    args: tuple[Any, ...], kwargs: dict[str, Any], dtype: torch.dtype
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return arguments cast to a dtype, the last one first.

    PyTorch casts them in the arguments of a call in C++ (`WrapFunction_` in ATen/autocast_mode.h), which gcc evaluates
    from right to left. Measured with torch 2.11 on an H100: bias, weight, input.
    """
    named = dict(reversed([(name, _cast(value, dtype)) for name, value in reversed(kwargs.items())]))
    return tuple(reversed([_cast(value, dtype) for value in reversed(args)])), named


def _guard() -> Any:
    return ExcludeDispatchKeyGuard(DispatchKeySet(DispatchKey.AutocastPrivateUse1))


def _lower(op: Any) -> Callable[..., Any]:
    def kernel(*args: Any, **kwargs: Any) -> Any:
        dtype = torch.get_autocast_dtype(BACKEND.type)
        with _guard():
            args, kwargs = _all_cast(args, kwargs, dtype)
            return op(*args, **kwargs)

    return kernel


def _fp32(op: Any) -> Callable[..., Any]:
    since = _SINCE.get(op, (2, 0))

    def kernel(*args: Any, **kwargs: Any) -> Any:
        with _guard():
            if _release < since:
                return op(*args, **kwargs)
            args, kwargs = _all_cast(args, kwargs, torch.float32)
            return op(*args, **kwargs)

    return kernel


def _fp32_dtype(op: Any) -> Callable[..., Any]:
    names = [argument.name for argument in schema_of(op).arguments]
    position = names.index("dtype")

    def kernel(*args: Any, **kwargs: Any) -> Any:
        dtype = kwargs.get("dtype") if len(args) <= position else args[position]
        first = args[0]
        with _guard():
            if dtype is None and _eligible(first) and first.dtype in (torch.float16, torch.bfloat16):
                if len(args) > position:
                    args = (*args[:position], torch.float32, *args[position + 1 :])
                else:
                    kwargs["dtype"] = torch.float32
            return op(*args, **kwargs)

    return kernel


def _widest(value: Any, widest: torch.dtype) -> torch.dtype:
    if isinstance(value, torch.Tensor):
        return torch.float32 if _eligible(value) and value.dtype is torch.float32 else widest
    if isinstance(value, list | tuple):
        for entry in value:
            widest = _widest(entry, widest)
    return widest


def _promote(op: Any) -> Callable[..., Any]:
    written_in_place = table.find(op, table.Kind.IN_PLACE) is not None

    def kernel(*args: Any, **kwargs: Any) -> Any:
        if written_in_place and autograd_engine.called_from_engine(1):
            # The formula's in-place op, which is not in CUDA's lists: nothing is cast.
            with _guard(), DisableTorchFunction():
                return op(*args, **kwargs)
        dtype = _widest(args, torch.get_autocast_dtype(BACKEND.type))
        with _guard():
            return op(*_all_cast(args, {}, dtype)[0], **kwargs)

    autograd_engine.passes_through(kernel)
    return kernel


def _norm(op: Any) -> Callable[..., Any]:
    # `fp32_append_dtype` calls the overload with an argument for the result's dtype.
    def kernel(tensor: Any, *args: Any) -> Any:
        with _guard():
            if _eligible(tensor) and tensor.dtype in (torch.float16, torch.bfloat16):
                return torch.ops.aten.norm(tensor, *args, dtype=torch.float32)
            return op(tensor, *args)

    return kernel


def _recurrent(op: Any) -> Callable[..., Any]:
    """_cudnn_rnn: all weights are copied into a buffer of half precision, also under bfloat16.

    Source: _cudnn_rnn_cast_reflatten in cudnn/RNN.cpp.
    """

    def kernel(tensor: Any, weights: Any, stride: int, buffer: Any, *rest: Any) -> Any:
        hidden, cell, mode, size, projected, layers = rest[:6]
        with _guard():
            first = weights[0] if buffer is None else buffer
            if _eligible(first) and first.dtype is not torch.float16:
                directions = 2 if rest[9] else 1
                count = recurrent.weight_count(mode, tensor.shape[-1], size, projected, layers, directions)
                buffer, weights = recurrent.flat_copies(weights, count, torch.float16)
            states, _ = _all_cast((tensor, hidden, cell), {}, torch.float16)
            return op(states[0], weights, stride, buffer, *states[1:], *rest[2:])

    return kernel


def _refuse_binary_cross_entropy(*args: Any, **kwargs: Any) -> Any:
    raise RuntimeError(
        "torch.nn.functional.binary_cross_entropy and torch.nn.BCELoss are unsafe to autocast.\n"
        "Many models use a sigmoid layer right before the binary cross entropy layer.\n"
        "In this case, combine the two layers using torch.nn.functional.binary_cross_entropy_with_logits\n"
        "or torch.nn.BCEWithLogitsLoss."
    )


def _register() -> None:
    if _registered:
        return
    fallback = torch.library.Library("_", "IMPL", "AutocastPrivateUse1")
    fallback.fallback(torch.library.fallthrough_kernel)
    aten = torch.library.Library("aten", "IMPL", "AutocastPrivateUse1")
    for names, make in ((_LOWER, _lower), (_FP32, _fp32), (_FP32_DTYPE, _fp32_dtype), (_PROMOTE, _promote)):
        for name in names:
            base, _, overload = name.partition(".")
            packet = getattr(torch.ops.aten, base, None)
            if packet is None:
                continue
            op = getattr(packet, overload or "default", None)
            if op is not None:
                aten.impl(name, make(op))
    aten.impl("norm.Scalar", _norm(torch.ops.aten.norm.Scalar))
    aten.impl("norm.ScalarOpt_dim", _norm(torch.ops.aten.norm.ScalarOpt_dim))
    aten.impl("_cudnn_rnn", _recurrent(torch.ops.aten._cudnn_rnn.default))
    aten.impl("binary_cross_entropy", _refuse_binary_cross_entropy)
    _registered.extend((fallback, aten))


def _renaming(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function of a device type for which `cuda`, the default, is the virtual device."""

    def renamed(device_type: Any = "cuda", *args: Any) -> Any:
        if isinstance(device_type, bool):
            return function(BACKEND.type, device_type)
        # `meta` is the C++ device of wrappers on the virtual GPU.
        return function(BACKEND.type if device_type in ("cuda", "meta") else device_type, *args)

    return renamed


def functions() -> dict[str, Callable[..., Any]]:
    """Return functions of `torch` by name, for which `torch.autocast("cuda")` is autocast of the virtual device."""
    clear = torch.clear_autocast_cache

    def clear_all() -> None:
        _cache.clear()
        clear()

    return {
        **{
            name: _renaming(getattr(torch, name))
            for name in ("is_autocast_enabled", "set_autocast_enabled", "get_autocast_dtype", "set_autocast_dtype")
        },
        "clear_autocast_cache": clear_all,
        "get_autocast_gpu_dtype": partial(torch.get_autocast_dtype, BACKEND.type),
        "set_autocast_gpu_dtype": partial(torch.set_autocast_dtype, BACKEND.type),
    }


def patches(release: tuple[int, int]) -> list[Patch]:
    """Return patches that make autocast follow the rules of a torch release; `functions` are not among them."""
    _register()
    return [
        Replace(sys.modules[__name__], "_release", release),
        Keep(partial(torch.get_autocast_dtype, BACKEND.type), partial(torch.set_autocast_dtype, BACKEND.type)),
        # CUDA's default is half precision; PrivateUse1 may have another.
        Call(partial(torch.set_autocast_dtype, BACKEND.type, torch.float16)),
        Call(unmake=_cache.clear),
    ]
