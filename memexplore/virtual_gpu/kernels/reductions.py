"""Request the memory of reductions: a buffer and semaphores where several thread blocks share one result.

Both depend on shape, strides, reduced dimensions and the GPU; `scratch` gives the bytes. Source: setReduceConfig,
ReduceConfig and gpu_reduce_kernel in aten/src/ATen/native/cuda/Reduce.cuh; the order of the dimensions is that of
TensorIterator (reorder_dimensions and coalesce_dimensions in aten/src/ATen/TensorIterator.cpp).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from memexplore.virtual_gpu.kernels import cuda_build
from memexplore.virtual_gpu.kernels.cuda_build import Build
from memexplore.virtual_gpu.kernels.plan import (
    Free,
    OpRunner,
    Requests,
    Scratch,
    accumulator_bytes,
    argument,
    nbytes,
    new_outputs,
)
from memexplore.virtual_gpu.kernels.table import Kind, rule
from memexplore.virtual_gpu.tensors.tensor import is_on_gpu

_aten = torch.ops.aten

_MAX_THREADS, _WARP = 512, 32

_MIN_VALUES, _MAX_VALUES = 16, 256

_CHUNK = 65536
"""Elements of one chunk of a multi-tensor kernel: kChunkSize in cuda/MultiTensorApply.cuh."""


def requests(
    source: torch.Tensor, dims: Sequence[int] | None, accumulator: int, dtype: torch.dtype | None = None
) -> Requests:
    """Return the scratch of one reduction: a cast copy where CUDA makes one (ReduceOpsUtils.h), buffer, semaphores.

    `accumulator` is the bytes of what one thread accumulates in, `dtype` that of the result.
    """
    scratch_requests: Requests = []
    cast = dtype is not None and dtype is not source.dtype
    if cast and not (source.dtype in (torch.float16, torch.bfloat16) and dtype is torch.float32):
        # The copy of a dense source has the source's strides.
        scratch_requests.append(Scratch(nbytes(source, dtype)))
    buffer = scratch(
        source.shape, source.stride(), dims or (), accumulator, cuda_build.current(), int(source.storage_offset())
    )
    if buffer is not None:
        scratch_requests += [Scratch(size) for size in buffer]
    return scratch_requests


def after_outputs(outputs: list[Any], further: Requests) -> Requests | None:
    """Return the requests of the outputs and further ones after them, None if there are no further ones."""
    return [*new_outputs(outputs), *further] if further else None


@rule(
    Kind.REQUESTS,
    "cuda/Reduce.cuh",
    _aten.sum.default,
    _aten.sum.dim_IntList,
    _aten.nansum.default,
    _aten.prod.default,
    _aten.mean.default,
    _aten.mean.dim,
)
def total(args: Any, kwargs: Any, outputs: list[Any]) -> Requests | None:
    """sum, nansum, prod, mean."""
    dims = args[1] if len(args) > 1 and isinstance(args[1], list | tuple) else None
    dtype = outputs[0].dtype
    return after_outputs(outputs, requests(args[0], dims, accumulator_bytes(dtype), dtype))


@rule(Kind.REQUESTS, "cuda/Reduce.cuh", _aten.amax.default, _aten.amin.default, _aten.max.default, _aten.min.default)
def extreme(args: Any, kwargs: Any, outputs: list[Any]) -> Requests | None:
    """amax, amin, max, min: a thread keeps one element."""
    dims = args[1] if len(args) > 1 else None
    dims = [dims] if isinstance(dims, int) else dims
    return after_outputs(outputs, requests(args[0], dims, outputs[0].dtype.itemsize))


@rule(
    Kind.REQUESTS,
    "cuda/Reduce.cuh",
    _aten.any.default,
    _aten.any.dim,
    _aten.all.default,
    _aten.all.dim,
    _aten._is_any_true.default,
    _aten._is_all_true.default,
)
def truth(args: Any, kwargs: Any, outputs: list[Any]) -> Requests | None:
    """any, all: of one element, a copy as a truth value (allany_impl in ReduceOps.cpp)."""
    if args[0].numel() == 1 and args[0].dtype is not torch.bool:
        return after_outputs(outputs, [Scratch(1)])
    return extreme(args, kwargs, outputs)


@rule(Kind.REQUESTS, "cuda/Reduce.cuh", _aten.max.dim, _aten.min.dim, _aten.argmax.default, _aten.argmin.default)
def extreme_with_index(args: Any, kwargs: Any, outputs: list[Any]) -> Requests | None:
    """max and min along a dimension, argmax, argmin: a thread keeps a value and its index, 16 bytes (ReduceOps.cuh)."""
    dim = args[1] if len(args) > 1 else kwargs.get("dim")
    return after_outputs(outputs, requests(args[0], None if dim is None else [dim], 16))


@rule(
    Kind.REQUESTS,
    "cuda/Reduce.cuh",
    _aten.var.correction,
    _aten.std.correction,
    _aten.var_mean.correction,
    _aten.std_mean.correction,
)
def variance(args: Any, kwargs: Any, outputs: list[Any]) -> Requests | None:
    """std, var and their means: Welford's mean, squared distance and two counts, 16 bytes (SharedReduceOps.h)."""
    return after_outputs(outputs, requests(args[0], argument(args, kwargs, 1, "dim"), 16))


@rule(Kind.REQUESTS, "cuda/Reduce.cuh", _aten.linalg_vector_norm.default)
def vector_norm(args: Any, kwargs: Any, outputs: list[Any]) -> Requests | None:
    """linalg.vector_norm."""
    accumulator = accumulator_bytes(outputs[0].dtype)
    return after_outputs(outputs, requests(args[0], argument(args, kwargs, 2, "dim"), accumulator))


@rule(Kind.REQUESTS, "cuda/ForeachReduceOp.cu", _aten._foreach_norm.Scalar)
def foreach_norm(args: Any, kwargs: Any, outputs: list[Any]) -> Requests:
    """One number for each chunk of each tensor, then the results: cuda/ForeachReduceOp.cu."""
    tensors = args[0]
    chunks = max(-(-tensor.numel() // _CHUNK) for tensor in tensors)
    return [Scratch(len(tensors) * chunks * accumulator_bytes(tensors[0].dtype)), *new_outputs(outputs)]


@rule(Kind.REQUESTS, "cuda/SummaryOps.cu", _aten.histc.default)
def histogram(args: Any, kwargs: Any, outputs: list[Any]) -> Requests | None:
    """histc without limits reads the smallest and the largest value: _histc_cuda in cuda/SummaryOps.cu."""
    source = args[0]
    if not source.numel() or argument(args, kwargs, 2, "min", 0) != argument(args, kwargs, 3, "max", 0):
        return None
    item = source.dtype.itemsize
    return [*new_outputs(outputs), Scratch(item), Free(0), Scratch(item), Free(1)]


@rule(Kind.OPS, "TensorAdvancedIndexing.cpp", _aten.count_nonzero.dim_IntList, _aten.count_nonzero.default)
def count_nonzero(runner: OpRunner, func: Any, args: Any, kwargs: Any) -> Any:
    """count_nonzero: comparisons, summed (TensorAdvancedIndexing.cpp)."""
    source = args[0]
    dims = argument(args, kwargs, 1, "dim")
    dims = [] if dims is None else [dims] if isinstance(dims, int) else dims
    if not is_on_gpu(source):
        return NotImplemented
    with runner:
        compared = source if source.dtype is torch.bool else _aten.ne.Scalar(source, 0)
        return _aten.sum.dim_IntList(compared, dims)


# --- bytes of buffer and semaphores: cuda/Reduce.cuh ------------------------------------------------------------------


class _Dimension(NamedTuple):
    size: int
    out: int
    input: int
    """Strides of the result (0 where it is reduced) and of the input, in elements."""


def _ceil_divide(value: int, divisor: int) -> int:
    return -(-value // divisor)


def _floor_power_of_two(value: int) -> int:
    """Return the largest power of two not above a value, at least 1: last_pow2."""
    return 1 << (value.bit_length() - 1) if value > 0 else 1


def _dimensions(shape: Sequence[int], stride: Sequence[int], reduced: frozenset[int]) -> list[_Dimension]:
    """Return the dimensions in TensorIterator's order: reduced ones first, then by stride, adjacent ones merged."""
    kept = [size if number not in reduced else 1 for number, size in enumerate(shape)]
    out, step = [0] * len(shape), 1
    for number in reversed(range(len(shape))):
        out[number] = 0 if number in reduced or shape[number] == 1 else step
        step *= kept[number]
    dims = [_Dimension(*values) for values in zip(shape, out, stride, strict=True)][::-1]
    _reorder(dims)
    return _merged(dims)


def _reorder(dims: list[_Dimension]) -> None:
    """Sort dimensions in place as reorder_dimensions does: by insertion, where some pairs have no order."""
    for end in range(1, len(dims)):
        position = end
        for before in reversed(range(end)):
            order = _compare(dims[before], dims[position])
            if order > 0:
                dims[before], dims[position] = dims[position], dims[before]
                position = before
            elif order < 0:
                break


def _compare(first: _Dimension, second: _Dimension) -> int:
    """Return 1 where two dimensions are exchanged, -1 where they are in order, 0 where their strides do not tell."""
    if (first.out == 0) != (second.out == 0):
        return 1 if second.out == 0 else -1
    for a, b in ((first.out, second.out), (first.input, second.input)):
        if a == 0 or b == 0:
            continue
        if a != b:
            return 1 if a > b else -1
        if first.size > second.size:
            return 1
    return 0


def _merged(dims: list[_Dimension]) -> list[_Dimension]:
    """Return the dimensions with adjacent ones joined that one stride can step through."""
    merged = dims[:1]
    for dim in dims[1:]:
        last = merged[-1]
        if last.size == 1:
            merged[-1] = dim
        elif dim.size == 1 or (last.size * last.out == dim.out and last.size * last.input == dim.input):
            merged[-1] = last._replace(size=last.size * dim.size)
        else:
            merged.append(dim)
    return merged


def _vector(dims: list[_Dimension], output: int, offset: int) -> int:
    """Return the results per load: the largest of 4, 2, 1 that divides offset, extent and the other strides."""
    size = 4
    for value in (offset, dims[output].size, *(dim.input for number, dim in enumerate(dims) if number != output)):
        while value % size:
            size //= 2
    return size


def scratch(
    shape: Sequence[int],
    stride: Sequence[int],
    reduced: Sequence[int],
    accumulator: int,
    build: Build,
    offset: int = 0,
) -> tuple[int, int] | None:
    """Return the bytes of a reduction's buffer and of its semaphores, None if one thread block makes each result.

    `reduced` are the reduced dimensions (empty: all), `accumulator` the bytes of what one thread accumulates in,
    `offset` the storage offset in elements. Example: the gradient of a norm's weight, as recorded on an RTX PRO 6000,
    where 32 blocks share each of 2560 results.

    >>> scratch((4, 512, 2560), (1310720, 2560, 1), (0, 1), 4, Build((2, 11), (12, 0), 188))
    (41943040, 80)
    """
    rank = len(shape)
    if not rank:
        return None
    axes = frozenset(axis % rank for axis in reduced) if reduced else frozenset(range(rank))
    inputs, outputs = _counts(shape, axes)
    if not 0 < inputs * outputs < 2**31:
        # A reduction beyond 32-bit indexing is split into parts, each below the limit of one launch.
        return None
    threads = _threads(_dimensions(shape, stride, axes), inputs, outputs, offset)
    if _ceil_divide(inputs, threads.inputs) < min(threads.height * 16, _MAX_VALUES):
        return None
    values = _ceil_divide(inputs, threads.inputs * threads.height)
    target = build.multiprocessors * (build.resident_threads // (threads.width * threads.height))
    grid = _ceil_divide(outputs // threads.vector, threads.outputs)
    if values < _MAX_VALUES or grid > target:
        return None
    blocks = max(min(_ceil_divide(target, grid), _ceil_divide(values, _MIN_VALUES)), _ceil_divide(values, _MAX_VALUES))
    if blocks <= 1:
        return None
    return accumulator * outputs * blocks * threads.outputs * threads.vector, 4 * grid


def _counts(shape: Sequence[int], reduced: frozenset[int]) -> tuple[int, int]:
    """Return the number of elements that make one result, and the number of results."""
    inputs = math.prod(size for number, size in enumerate(shape) if number in reduced)
    return inputs, math.prod(size for number, size in enumerate(shape) if number not in reduced)


class _Threads(NamedTuple):
    """Shape of a thread block, and over what its rows of `width` threads go."""

    width: int
    height: int
    vector: int
    """Results that one thread makes at once."""
    inputs: int
    """Elements of the input that a row takes side by side: its width where it reduces the fastest dimension, else 1."""
    outputs: int
    """Results that a row makes side by side: 1 where it reduces the fastest dimension, else its width."""


def _threads(dims: list[_Dimension], inputs: int, outputs: int, offset: int) -> _Threads:
    """Return the thread block of a reduction of `inputs` elements for each of `outputs` results: setReduceConfig."""
    count = sum(dim.out == 0 for dim in dims)
    fastest = count == len(dims) or dims[0].input < dims[count].input
    vector = 1
    if fastest:
        dim0, dim1 = inputs, outputs
        if dims[0].input == 1 and dim0 >= 128 and count == 1:
            dim0 //= 4
    else:
        dim0, dim1 = outputs, inputs
        if dims[count].input == 1:
            vector = _vector(dims, count, offset)
            dim0 //= vector
    most = _MAX_THREADS // vector
    width_limit, height_limit = (_floor_power_of_two(dim) if dim < most else most for dim in (dim0, dim1))
    width = min(width_limit, _WARP)
    height = min(height_limit, most // width)
    width = min(width_limit, most // height)
    return _Threads(width, height, vector, width if fastest else 1, 1 if fastest else width)
