"""Memory of the fused attention kernels (flash, memory-efficient, cuDNN), forward and backward, and of safe softmax.

In: the op's arguments. Out: `Plan`s with outputs and requests. Source: transformers/cuda/attention.cu,
attention_backward.cu, flash_attn/flash_api.cpp, mem_eff_attention/ kernel_backward.h and cudnn/MHA.cpp, all below
aten/src/ATen/native.
"""

from __future__ import annotations

import math
from typing import Any

import torch

from memexplore.tape import Category
from memexplore.virtual_gpu.kernels import cuda_build
from memexplore.virtual_gpu.kernels.plan import Constant, Free, Output, Plan, Requests, Scratch
from memexplore.virtual_gpu.kernels.shapes import argument, is_contiguous, like, new
from memexplore.virtual_gpu.tensors import values

_HALF = (torch.float16, torch.bfloat16)
_SWAPPED = (0, 2, 1, 3)
_CUDNN_STATE = 256
"""Bytes of cuDNN's workspace of a forward pass, and of that of a backward pass beside its sums.

Measured with torch 2.11 and cuDNN 9.19 on an H100.
"""


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


def cudnn_backward(args: Any, kwargs: Any) -> Plan:
    """run_cudnn_SDP_bprop in cudnn/MHA.cpp; cuDNN's workspace is an estimate."""
    query, key, value = args[1:4]
    values.note(
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


def safe_softmax(args: Any, kwargs: Any, outputs: list[Any]) -> Requests:
    """softmax, then zeros in rows that are -inf throughout: _safe_softmax in transformers/attention.cpp."""
    source, dim = args[:2]
    size, item = outputs[0].size, outputs[0].dtype.itemsize
    rows = source.numel() // max(source.shape[dim], 1)
    if cuda_build.current().release >= (2, 11):
        # Compared with a number and written in place, as measured with torch 2.11.
        return [Output(0), Scratch(source.numel()), Scratch(rows), Scratch(item)]
    return [Scratch(size), Scratch(item), Scratch(source.numel()), Scratch(rows), Scratch(item), Output(0)]
