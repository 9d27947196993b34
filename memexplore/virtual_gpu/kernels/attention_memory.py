"""What the attention kernels return and request, forward and backward.

Source: transformers/cuda/attention.cu, attention_backward.cu, flash_attn/flash_api.cpp, mem_eff_attention/
kernel_backward.h and cudnn/MHA.cpp, all below aten/src/ATen/native.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch

from memexplore.tape import Category
from memexplore.virtual_gpu.dispatch.plans import Constant, Free, Output, Plan, Scratch
from memexplore.virtual_gpu.kernels import cuda_build
from memexplore.virtual_gpu.kernels.shapes import Requests, contiguous, given, like, new
from memexplore.virtual_gpu.tensors import values

_aten = torch.ops.aten
_HALF = (torch.float16, torch.bfloat16)
_SWAPPED = (0, 2, 1, 3)


def flash_forward(args: Any, kwargs: Any) -> Plan:
    """mha_fwd in flash_api.cpp; the key and value are split over blocks where there are too few of them."""
    query, key = args[:2]
    dropout = given(args, kwargs, 3, "dropout_p", 0.0)
    batch, heads, length, width = query.shape
    ours = cuda_build.current()
    host = ours.release < (2, 7)
    state = new((), torch.int64, host=True) if host else new((2,), torch.uint64)
    unused = new((), torch.int64 if host else torch.uint64, host=host)
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
    if dropout and not host:
        # The state is taken anew before the old one goes.
        requests += [Scratch(16), Output(7), Output(6)]
    else:
        requests += [Output(6), Output(7)]
    return Plan(outputs, tuple, requests, False, None)


def _rounded(width: int) -> int:
    multiple = 32 if width <= 128 else 64
    return -(-width // multiple) * multiple


def _splits(blocks: int, length: int, width: int) -> int:
    """num_splits_heuristic: as many splits of the keys as fill the card to 85 % of the best that any number does."""
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


def flash_backward(args: Any, kwargs: Any) -> Plan:
    """mha_bwd in flash_api.cpp: gradients, the rows' dot products, the query's gradient in float32."""
    gradient, query, key, value, out = args[:5]
    batch, heads, length, width = query.shape
    rows = -(-length // 128) * 128
    requests: Requests = []
    for tensor in (gradient, out):
        if not contiguous(tensor, _SWAPPED):
            requests.append(Scratch(tensor.numel() * tensor.dtype.itemsize))
    requests += [Output(0), Output(1), Output(2)]
    requests += [Scratch(4 * batch * heads * rows), Scratch(4 * batch * rows * heads * _rounded(width))]
    if key.shape[1] != heads:
        size = batch * key.shape[2] * heads * width * query.dtype.itemsize
        requests += [Scratch(size), Scratch(size)]
    return Plan([like(query), like(key), like(value)], tuple, requests, False, None)


def efficient_forward(args: Any, kwargs: Any) -> Plan:
    """_efficient_attention_forward in attention.cu; its seed and offset are on the CPU. Recorded with torch 2.1."""
    query, _, value, _, wants_sums = args[:5]
    batch, heads, length, width = query.shape
    inner = value.shape[-1]
    rows = -(-length // 32) * 32 if wants_sums else 0
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
    return Plan(outputs, tuple, requests, False, None)


def efficient_backward(args: Any, kwargs: Any) -> Plan:
    """_efficient_attention_backward in attention_backward.cu. Recorded with torch 2.1 for float32."""
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
        whole = new((*bias.shape[:-1], last), bias.dtype)
        outputs[3] = whole._replace(shape=tuple(bias.shape))
        requests.append(Output(3))
    sums = 4 * batch * heads * length
    start = len([entry for entry in requests if type(entry) is Scratch])
    half = query.dtype in _HALF
    if half:
        requests.append(Scratch(sums))
    else:
        # The product of gradient and output, its sums, and these in another order.
        product = batch * length * heads * inner * 4
        requests += [Scratch(product), Scratch(sums), Scratch(sums), Free(start + 1), Free(start)]
    requests.append(Scratch(_efficient_workspace(query, key, value)))
    # The sums go before the workspace does.
    requests.append(Free(start if half else start + 2))
    return Plan(outputs, tuple, requests, False, None)


def _efficient_workspace(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> int:
    """workspace_size in mem_eff_attention/kernel_backward.h: the query's gradient in float32, in blocks of 64 by 64.

    Heads that do not fit into registers sum the gradients of key and value there too.
    """
    batch, heads, length, width = query.shape
    inner, keys = value.shape[-1], key.shape[2]
    half = query.dtype in _HALF
    modern = cuda_build.current().compute_capability >= (8, 0)
    side = 128 if half and modern and 64 < max(width, inner) <= 128 else 64
    floats = -(-length // side) * -(-width // 64) * (side * 64 + 4)
    if half and max(width, inner) > side:
        aligned = -(-keys // 64) * 64
        floats += aligned * (-(-width // side) * side + -(-inner // side) * side)
    return batch * heads * (-(-floats // 4) * 4) * 4


def cudnn_forward(args: Any, kwargs: Any) -> Plan:
    """_scaled_dot_product_cudnn_attention_cuda in attention.cu and run_cudnn_SDP_fprop in cudnn/MHA.cpp."""
    query, key, value, _, wants_sums = args[:5]
    batch, heads, length, _ = query.shape
    outputs: list[Any] = [
        like(query, value.shape[-1]),
        new((batch, heads, length, 1), torch.float32) if wants_sums else new((0,), torch.float32),
        Constant(None),
        Constant(None),
        Constant(length),
        Constant(key.shape[2]),
        new((), torch.int64),
        new((), torch.int64),
        Constant(None),
    ]
    return Plan(outputs, tuple, [Output(6), Output(7), Output(0), Output(1)], False, None)


def cudnn_backward(args: Any, kwargs: Any) -> Plan:
    """run_cudnn_SDP_bprop in cudnn/MHA.cpp; cuDNN's workspace is an estimate."""
    query, key, value = args[1:4]
    values.note(
        "cuDNN's workspace for the backward pass of attention is an estimate: the query's gradient in float32 and one "
        "number for each row (range: none to twice that)"
    )
    batch, heads, length, width = query.shape
    workspace = 4 * batch * heads * length * (width + 1)
    requests: Requests = [Output(0), Output(1), Output(2), Scratch(workspace, Category.WORKSPACE)]
    return Plan([like(query), like(key), like(value)], tuple, requests, False, None)


PLANS: dict[Any, Callable[[Any, Any], Plan]] = {
    _aten._scaled_dot_product_flash_attention.default: flash_forward,
    _aten._scaled_dot_product_flash_attention_backward.default: flash_backward,
    _aten._scaled_dot_product_efficient_attention.default: efficient_forward,
    _aten._scaled_dot_product_efficient_attention_backward.default: efficient_backward,
    _aten._scaled_dot_product_cudnn_attention.default: cudnn_forward,
    _aten._scaled_dot_product_cudnn_attention_backward.default: cudnn_backward,
}
