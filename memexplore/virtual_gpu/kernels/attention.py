"""Choose the kernel of scaled dot-product attention as a CUDA build does, and request the memory of the fused ones.

Sources are below aten/src/ATen/native. Of the choice: transformers/cuda/sdp_utils.cpp (select_sdp_backend and its
checks) and transformers/sdp_utils_cpp.h; of the ops before and after the kernels: transformers/attention.cpp; of their
memory: transformers/cuda/attention.cu, attention_backward.cu, flash_attn/flash_api.cpp,
mem_eff_attention/kernel_backward.h and cudnn/MHA.cpp.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from memexplore.tape import Category
from memexplore.torch_internals.dispatch import sdp_priority_order
from memexplore.virtual_gpu.kernels import cuda_build
from memexplore.virtual_gpu.kernels.plan import (
    Constant,
    Free,
    Output,
    Plan,
    Requests,
    Scratch,
    argument,
    is_contiguous,
    like,
    new,
)
from memexplore.virtual_gpu.kernels.table import Kind, rule
from memexplore.virtual_gpu.values import notes

_aten = torch.ops.aten

_HALF = (torch.float16, torch.bfloat16)


class Kernel(enum.IntEnum):
    """Kernels, numbered as `torch.nn.attention.SDPBackend`."""

    MATH = 0
    FLASH = 1
    EFFICIENT = 2
    CUDNN = 3


class Call(NamedTuple):
    """Arguments of scaled_dot_product_attention that decide the kernel."""

    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    mask: torch.Tensor | None
    dropout: float
    causal: bool
    grouped: bool
    """`enable_gqa`: several heads of the query share a head of key and value."""

    @property
    def requires_grad(self) -> bool:
        """Whether autograd saves the log-sum-exp for backward."""
        return torch.is_grad_enabled() and any(tensor.requires_grad for tensor in self[:3])


# --- the choice of the kernel ---------------------------------------------------------------------------------------


def chosen_kernel(call: Call) -> Kernel:
    """Return the kernel that a CUDA build runs, by GPU, dtypes, shapes, mask, torch release and enabled backends.

    Raises RuntimeError, as PyTorch does, if no enabled backend supports the arguments.
    """
    for kernel in _priority_order():
        if _CHECKS[kernel](call):
            return kernel
    raise RuntimeError("No available kernel. Aborting execution.")


def settings() -> tuple[Any, ...]:
    """Return the global settings that decide the kernel and the dtype of the unfused one."""
    cuda = torch.backends.cuda
    return (
        *sdp_priority_order(),
        cuda.flash_sdp_enabled(),
        cuda.mem_efficient_sdp_enabled(),
        cuda.cudnn_sdp_enabled(),
        cuda.math_sdp_enabled(),
        cuda.fp16_bf16_reduction_math_sdp_allowed(),
        torch.are_deterministic_algorithms_enabled(),
        torch.is_deterministic_algorithms_warn_only_enabled(),
    )


def _priority_order() -> list[Kernel]:
    order = [Kernel(number) for number in sdp_priority_order() if number in list(Kernel)]
    default = [Kernel.FLASH, Kernel.EFFICIENT, Kernel.MATH, Kernel.CUDNN]
    build = cuda_build.current()
    # check_prefer_cudnn_attention: releases whose wheels bring a cuDNN that it accepts (9.10 and, from 2.11 on, 9.19).
    accepted = (2, 8) <= build.release <= (2, 9) or build.release >= (2, 11)
    if order == default and accepted and build.compute_capability[0] in (9, 10):
        return [Kernel.CUDNN, Kernel.FLASH, Kernel.EFFICIENT, Kernel.MATH]
    return order


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


def _last_dim_is_dense(call: Call, *, allow_extent_one: bool) -> bool:
    """Return whether the last dimension has stride 1; `allow_extent_one`: or, with any stride, extent 1."""
    mask = () if call.mask is None else (call.mask,)
    return all(tensor.stride(-1) == 1 or (allow_extent_one and tensor.shape[-1] == 1) for tensor in (*call[:3], *mask))


def _have_dtype(call: Call, dtypes: tuple[torch.dtype, ...]) -> bool:
    query, key, value = call[:3]
    return query.dtype is key.dtype is value.dtype and query.dtype in dtypes


def _half_dtypes() -> tuple[torch.dtype, ...]:
    return _HALF if cuda_build.current().compute_capability >= (8, 0) else (torch.float16,)


def _flash(call: Call) -> bool:
    if not torch.backends.cuda.flash_sdp_enabled() or call.mask is not None:
        return False
    query, key, value = call[:3]
    width = query.shape[-1]
    capability = cuda_build.current().compute_capability
    if not width == key.shape[-1] == value.shape[-1] or width > 256 or not (8, 0) <= capability <= (12, 1):
        return False
    small_shared_memory = (8, 6) <= capability <= (8, 9) or capability >= (12, 0)
    requires_grad = any(tensor.requires_grad for tensor in call[:3])
    if small_shared_memory and requires_grad and not (width <= 192 or (call.dropout == 0 and width > 224)):
        return False
    if call.causal and query.shape[-2] != key.shape[-2]:
        return False
    return (
        _have_dtype(call, _half_dtypes())
        and _shapes_fit(call, grouping=True)
        and _last_dim_is_dense(call, allow_extent_one=True)
    )


def _alignment(dtype: torch.dtype) -> int:
    """Return the number of elements that must divide the head dimension: minimum_gemm_alignment."""
    major = cuda_build.current().compute_capability[0]
    half = dtype in _HALF
    alignment = 4 if major >= 8 else 1
    if major >= 8 or (major >= 7 and half):
        alignment = max(alignment, 128 // (16 if half else 32))
    return alignment


def _efficient(call: Call) -> bool:
    if not torch.backends.cuda.mem_efficient_sdp_enabled():
        return False
    query, key, value = call[:3]
    build = cuda_build.current()
    dtypes = (*_half_dtypes(), torch.float32)
    if not _have_dtype(call, dtypes) or not _shapes_fit(call, grouping=build.release >= (2, 15)):
        return False
    alignment = _alignment(query.dtype)
    if query.shape[-1] != key.shape[-1] or 0 in (query.shape[-1], value.shape[-1]):
        return False
    if query.shape[-1] % alignment or value.shape[-1] % alignment:
        return False
    return _last_dim_is_dense(call, allow_extent_one=False)


def _cudnn(call: Call) -> bool:
    if not torch.backends.cuda.cudnn_sdp_enabled():
        return False
    query, key, value, mask = call[:4]
    build = cuda_build.current()
    if build.compute_capability < (8, 0) or not _have_dtype(call, _half_dtypes()):
        return False
    # Torch 2.11 runs it with a dropout of 0.1, as measured on an H100.
    if call.dropout * 16 % 1 and build.release < (2, 11):
        return False
    if torch.are_deterministic_algorithms_enabled() and not torch.is_deterministic_algorithms_warn_only_enabled():
        return False
    if mask is not None and not _mask_fits(call, mask):
        return False
    if not _shapes_fit(call, grouping=True) or not _last_dim_is_dense(call, allow_extent_one=True):
        return False
    widths = query.shape[-1], value.shape[-1]
    if max(widths) > 128 or any(width % 8 for width in widths):
        return False
    return key.shape[-2] != 1 and not (call.dropout and query.shape[-2] == 1)


def _mask_fits(call: Call, mask: torch.Tensor) -> bool:
    if mask.requires_grad or mask.dim() not in (2, 4):
        return False
    full = (call.query.shape[0], call.query.shape[1], call.query.shape[2], call.key.shape[2])
    return all(size in (1, extent) for size, extent in zip(reversed(mask.shape), reversed(full), strict=False))


_CHECKS: dict[Kernel, Callable[[Call], bool]] = {
    Kernel.FLASH: _flash,
    Kernel.EFFICIENT: _efficient,
    Kernel.CUDNN: _cudnn,
    Kernel.MATH: lambda call: torch.backends.cuda.math_sdp_enabled(),
}

# --- ops before and after the kernels: transformers/attention.cpp ---------------------------------------------------


@rule(Kind.COMPOSITE, "transformers/attention.cpp", _aten.scaled_dot_product_attention.default)
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
    """The composite op as it runs on CUDA: masks and padding, then the chosen kernel."""
    call = Call(query, key, value, mask, dropout, causal, enable_gqa)
    kernel = chosen_kernel(call)
    if mask is not None and mask.dtype is torch.bool:
        mask = _as_bias(mask, query.dtype)
    if kernel is Kernel.FLASH:
        width = query.shape[-1]
        scale = 1 / math.sqrt(width) if scale is None else scale
        query, key, value = (_padded(tensor, 8) for tensor in (query, key, value))
        result = _first(
            _aten._scaled_dot_product_flash_attention(query, key, value, dropout, causal, False, scale=scale)
        )
        return result if result.shape[-1] == width else result[..., :width]
    if kernel is Kernel.EFFICIENT:
        if mask is not None:
            mask = _aligned(mask).expand(query.shape[0], query.shape[1], query.shape[2], key.shape[2])
        return _first(
            _aten._scaled_dot_product_efficient_attention(
                query, key, value, mask, call.requires_grad, dropout, causal, scale=scale
            )
        )
    if kernel is Kernel.CUDNN:
        return _first(
            _aten._scaled_dot_product_cudnn_attention(
                query, key, value, mask, call.requires_grad, dropout, causal, False, scale=scale
            )
        )
    return _math(query, key, value, mask, dropout, causal, scale, enable_gqa)


def _first(results: tuple[Any, ...]) -> Any:
    """Return the first result of a kernel; the others are freed from first to last, as C++ destroys a tuple."""
    first, *others = results
    del results
    others.reverse()  # Python empties a list from its end.
    return first


def _as_bias(mask: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return 0 where the mask is true, -inf elsewhere: convert_boolean_attn_mask.

    Requests as measured with torch 2.11 on an H100.
    """
    if cuda_build.current().release < (2, 5):
        return torch.where(mask.logical_not(), float("-inf"), torch.scalar_tensor(0.0, dtype=dtype, device=mask.device))
    return torch.where(mask, 0.0, torch.scalar_tensor(float("-inf"), dtype=dtype, device=mask.device))


def _padded(tensor: torch.Tensor, multiple: int) -> torch.Tensor:
    missing = -tensor.shape[-1] % multiple
    return _aten.constant_pad_nd(tensor, [0, missing], 0) if missing else tensor


def _aligned(mask: torch.Tensor) -> torch.Tensor:
    """Return a mask whose rows start at multiples of 8 elements, padded (by at least 1) and sliced: preprocess_mask."""
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
    """The unfused kernel, from torch 2.5 on in float32 for half precision: _scaled_dot_product_attention_math."""
    release = cuda_build.current().release
    dtype = query.dtype
    if release >= (2, 5) and dtype in _HALF and not torch.backends.cuda.fp16_bf16_reduction_math_sdp_allowed():
        query, key, value = query.float(), key.float(), value.float()
    root = math.sqrt(abs(scale) if scale is not None else 1 / math.sqrt(query.shape[-1]))
    query = query * (-root if scale is not None and scale < 0 else root)
    if causal:
        mask = torch.ones(query.shape[-2], key.shape[-2], dtype=torch.bool, device=query.device).tril()
        mask = _as_bias(mask, query.dtype)
    if grouped:
        repeats = query.shape[-3] // key.shape[-3], query.shape[-3] // value.shape[-3]
        key, value = key.repeat_interleave(repeats[0], -3), value.repeat_interleave(repeats[1], -3)
    weights = torch.matmul(query, key.transpose(-2, -1) * root)
    if mask is not None:
        weights = weights.add_(mask.to(weights.dtype) if mask.dtype is not weights.dtype else mask)
    weights = _aten._safe_softmax(weights, -1) if release >= (2, 5) else torch.softmax(weights, -1)
    if dropout > 0:
        weights = torch.dropout(weights, dropout, True)
    return torch.matmul(weights, value).to(dtype)


# --- memory of the fused kernels, forward and backward --------------------------------------------------------------

_SWAPPED = (0, 2, 1, 3)

_CUDNN_STATE = 256
"""Bytes of cuDNN's workspace of a forward pass, and of that of a backward pass beside its sums.

Measured with torch 2.11 and cuDNN 9.19 on an H100.
"""


@rule(Kind.PLAN, "transformers/cuda/flash_attn/flash_api.cpp", _aten._scaled_dot_product_flash_attention.default)
def flash_forward(args: Any, kwargs: Any) -> Plan:
    """mha_fwd in flash_api.cpp; key and value are split among blocks where the rows give too few blocks."""
    query, key = args[:2]
    dropout = argument(args, kwargs, 3, "dropout_p", 0.0)
    batch, heads, length, width = query.shape
    build = cuda_build.current()
    on_cpu = build.release < (2, 7)
    state = new((), torch.int64, host=True) if on_cpu else new((2,), torch.uint64)
    unused = new((), torch.int64 if on_cpu else torch.uint64, host=on_cpu)
    outputs: list[Any] = [
        like(query),
        new((batch, heads, length), torch.float32),
        Constant(None),
        Constant(None),
        Constant(length),
        Constant(key.shape[2]),
        state,
        unused,
        new((0,), query.dtype),
    ]
    requests: Requests = [Output(0), Output(1)]
    splits = _splits(batch * heads * -(-length // 64), key.shape[2], width) if dropout == 0 else 1
    if splits > 1:
        rows = 4 * splits * batch * heads * length
        requests += [Scratch(rows), Scratch(rows * _rounded(width))]
    if dropout and not on_cpu:
        # The new random state is allocated before the old one is freed.
        requests += [Scratch(16), Output(7), Output(6)]
    else:
        requests += [Output(6), Output(7)]
    return Plan(outputs, tuple, requests)


def _rounded(width: int) -> int:
    multiple = 32 if width <= 128 else 64
    return -(-width // multiple) * multiple


def _splits(blocks: int, length: int, width: int) -> int:
    """Return the fewest splits of the keys that reach 85 % of the best efficiency: num_splits_heuristic."""
    processors = cuda_build.current().multiprocessors * 2
    size = 256 if width <= 64 else 128 if width <= 128 else 64
    parts = -(-length // size)
    if blocks >= 0.8 * processors:
        return 1
    most = min(128, processors, parts)
    eligible = [n for n in range(1, most + 1) if n == 1 or -(-parts // n) != -(-parts // (n - 1))]
    efficiency = {n: (blocks * n / processors) / math.ceil(blocks * n / processors) for n in eligible}
    best = max(efficiency.values())
    return next((n for n in eligible if efficiency[n] >= 0.85 * best), 1)


@rule(
    Kind.PLAN, "transformers/cuda/flash_attn/flash_api.cpp", _aten._scaled_dot_product_flash_attention_backward.default
)
def flash_backward(args: Any, kwargs: Any) -> Plan:
    """mha_bwd in flash_api.cpp: gradients, dot products of the rows, the query's gradient in float32."""
    gradient, query, key, value, out = args[:5]
    batch, heads, length, width = query.shape
    rows = -(-length // 128) * 128
    requests: Requests = []
    for tensor in (gradient, out):
        if not is_contiguous(tensor, _SWAPPED):
            requests.append(Scratch(tensor.numel() * tensor.dtype.itemsize))
    requests += [Output(0), Output(1), Output(2)]
    requests += [Scratch(4 * batch * heads * rows), Scratch(4 * batch * rows * heads * _rounded(width))]
    if key.shape[1] != heads:
        size = batch * key.shape[2] * heads * width * query.dtype.itemsize
        requests += [Scratch(size), Scratch(size)]
    return Plan([like(query), like(key), like(value)], tuple, requests)


@rule(Kind.PLAN, "transformers/cuda/attention.cu", _aten._scaled_dot_product_efficient_attention.default)
def efficient_forward(args: Any, kwargs: Any) -> Plan:
    """_efficient_attention_forward in attention.cu; seed and offset are on the CPU. As recorded with torch 2.1."""
    query, _, value, _, compute_log_sumexp = args[:5]
    batch, heads, length, width = query.shape
    inner = value.shape[-1]
    rows = -(-length // 32) * 32 if compute_log_sumexp else 0
    outputs: list[Any] = [
        new((batch, heads, length, inner), query.dtype, _SWAPPED),
        new((batch, heads, rows), torch.float32),
        new((), torch.int64, host=True),
        new((), torch.int64, host=True),
    ]
    requests: Requests = [Output(0), Output(1)]
    if query.dtype in _HALF and max(width, inner) > 128:
        # Heads wider than a block's registers are summed in memory, in float32.
        requests.append(Scratch(4 * batch * length * heads * inner))
    return Plan(outputs, tuple, requests)


@rule(
    Kind.PLAN, "transformers/cuda/attention_backward.cu", _aten._scaled_dot_product_efficient_attention_backward.default
)
def efficient_backward(args: Any, kwargs: Any) -> Plan:
    """_efficient_attention_backward in attention_backward.cu; for float32 as recorded with torch 2.1."""
    query, key, value, bias = args[1:5]
    mask = args[10]
    batch, heads, length, _ = query.shape
    inner = value.shape[-1]
    outputs: list[Any] = [
        new(tuple(query.shape), query.dtype, _SWAPPED),
        new(tuple(key.shape), key.dtype, _SWAPPED),
        new(tuple(value.shape), value.dtype, _SWAPPED),
        Constant(None),
    ]
    requests: Requests = [Output(0), Output(1), Output(2)]
    if bias is not None and mask[3]:
        last = -(-bias.shape[-1] // 16) * 16
        padded = new((*bias.shape[:-1], last), bias.dtype)
        outputs[3] = padded._replace(shape=tuple(bias.shape))
        requests.append(Output(3))
    sums = 4 * batch * heads * length
    start = len([entry for entry in requests if type(entry) is Scratch])
    half = query.dtype in _HALF
    if half:
        requests.append(Scratch(sums))
    else:
        # The product of gradient and output, its row sums, and the sums in another order.
        product = batch * length * heads * inner * 4
        requests += [Scratch(product), Scratch(sums), Scratch(sums), Free(start + 1), Free(start)]
    requests.append(Scratch(_efficient_workspace(query, key, value)))
    # The sums are freed before the workspace.
    requests.append(Free(start if half else start + 2))
    return Plan(outputs, tuple, requests)


def _efficient_workspace(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> int:
    """Return workspace_size of mem_eff_attention/kernel_backward.h: the query's gradient in float32, in 64 x 64 blocks.

    Heads that do not fit into registers accumulate the gradients of key and value in it too.
    """
    batch, heads, length, width = query.shape
    inner, keys = value.shape[-1], key.shape[2]
    half = query.dtype in _HALF
    modern = cuda_build.current().compute_capability >= (8, 0)
    side = 128 if modern and 64 < max(width, inner) <= 128 else 64
    floats = -(-length // side) * -(-width // 64) * (side * 64 + 4)
    if half and max(width, inner) > side:
        aligned = -(-keys // 64) * 64
        floats += aligned * (-(-width // side) * side + -(-inner // side) * side)
    return batch * heads * (-(-floats // 4) * 4) * 4


@rule(Kind.PLAN, "cudnn/MHA.cpp", _aten._scaled_dot_product_cudnn_attention.default)
def cudnn_forward(args: Any, kwargs: Any) -> Plan:
    """_scaled_dot_product_cudnn_attention_cuda in attention.cu and run_cudnn_SDP_fprop in cudnn/MHA.cpp."""
    query, key, value, _, compute_log_sumexp = args[:5]
    batch, heads, length, _ = query.shape
    outputs: list[Any] = [
        like(query, value.shape[-1]),
        new((batch, heads, length, 1), torch.float32) if compute_log_sumexp else new((0,), torch.float32),
        Constant(None),
        Constant(None),
        Constant(length),
        Constant(key.shape[2]),
        new((), torch.int64),
        new((), torch.int64),
        Constant(None),
    ]
    requests: Requests = [Output(6), Output(7), Output(0), Output(1), Scratch(_CUDNN_STATE, Category.WORKSPACE)]
    return Plan(outputs, tuple, requests)


@rule(Kind.PLAN, "cudnn/MHA.cpp", _aten._scaled_dot_product_cudnn_attention_backward.default)
def cudnn_backward(args: Any, kwargs: Any) -> Plan:
    """run_cudnn_SDP_bprop in cudnn/MHA.cpp; cuDNN's workspace is an estimate."""
    query, key, value = args[1:4]
    notes.add(
        "cuDNN's workspace for the backward pass of attention is an estimate: the query's gradient in float32 and one "
        "number for each row (range: 0 to twice that)"
    )
    batch, heads, length, width = query.shape
    workspace = 4 * batch * heads * length * (width + 1) + _CUDNN_STATE
    if key.shape[1] < heads:
        # Gradients of key and value for each head of the query, as measured with torch 2.11.
        workspace += batch * heads * key.shape[2] * (width + value.shape[-1]) * key.dtype.itemsize
    requests: Requests = [Output(0), Output(1), Output(2), Scratch(workspace, Category.WORKSPACE)]
    return Plan([like(query), like(key), like(value)], tuple, requests)
