"""What a reduction requests beside its result: a buffer and semaphores where thread blocks share one result.

Source: setReduceConfig, ReduceConfig and gpu_reduce_kernel in aten/src/ATen/native/cuda/Reduce.cuh; the order in which
the dimensions come is that of TensorIterator (reorder_dimensions and coalesce_dimensions in ATen/TensorIterator.cpp).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from memexplore.virtual_gpu.kernels.cuda_build import Build

_MAX_THREADS, _WARP = 512, 32
_MIN_VALUES, _MAX_VALUES = 16, 256


class _Dimension(NamedTuple):
    size: int
    out: int
    input: int
    """Strides of the result (0 where it is reduced) and of the input, in elements."""


def _up(value: int, divisor: int) -> int:
    return -(-value // divisor)


def _power(value: int) -> int:
    """The largest power of two not above a value, at least 1."""
    return 1 << (value.bit_length() - 1) if value > 0 else 1


def _dimensions(shape: Sequence[int], stride: Sequence[int], reduced: frozenset[int]) -> list[_Dimension]:
    """The dimensions as TensorIterator walks them: reduced ones first, then by stride, merged where they can."""
    kept = [size if number not in reduced else 1 for number, size in enumerate(shape)]
    out, step = [0] * len(shape), 1
    for number in reversed(range(len(shape))):
        out[number] = 0 if number in reduced or shape[number] == 1 else step
        step *= kept[number]
    dims = [_Dimension(*values) for values in zip(shape, out, stride, strict=True)][::-1]

    def swaps(first: _Dimension, second: _Dimension) -> int:
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

    for end in range(1, len(dims)):
        place = end
        for before in reversed(range(end)):
            order = swaps(dims[before], dims[place])
            if order > 0:
                dims[before], dims[place] = dims[place], dims[before]
                place = before
            elif order < 0:
                break
    merged: list[_Dimension] = []
    for dim in dims:
        if merged:
            last = merged[-1]
            if last.size == 1:
                merged[-1] = dim
                continue
            if dim.size == 1 or (last.size * last.out == dim.out and last.size * last.input == dim.input):
                merged[-1] = last._replace(size=last.size * dim.size)
                continue
        merged.append(dim)
    return merged


def _vector(dims: list[_Dimension], output: int, offset: int) -> int:
    """How many results one load covers: the largest of 4, 2, 1 that divides offset, extent and the other strides."""
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
    """Bytes of the buffer and of the semaphores that a reduction asks for, None where one thread block does.

    `reduced` are the reduced dimensions (none means all), `accumulator` the bytes of what a thread accumulates in.
    The gradient of a norm's weight, as recorded on an RTX PRO 6000: 32 blocks share each of 2560 results.

    >>> scratch((4, 512, 2560), (1310720, 2560, 1), (0, 1), 4, Build((2, 11), (12, 0), 188))
    (41943040, 80)
    """
    rank = len(shape)
    axes = frozenset(axis % rank for axis in reduced) if reduced else frozenset(range(rank))
    total = outputs = 1
    for number, size in enumerate(shape):
        total *= size
        outputs *= 1 if number in axes else size
    if total == 0 or total >= 2**31:
        # Beyond 32-bit indexing it is split into parts; each of them is below the limit of one launch.
        return None
    inputs = total // outputs
    dims = _dimensions(shape, stride, axes)
    count = sum(dim.out == 0 for dim in dims)
    if not dims:
        return None
    fastest = count == len(dims) or dims[0].input < dims[count].input
    step_input = step_output = vector = 1
    if fastest:
        dim0, dim1, moving = inputs, outputs, dims[0].input
    else:
        dim0, dim1, moving = outputs, inputs, dims[count].input
    if moving == 1:
        if fastest and dim0 >= 128 and count == 1:
            dim0 //= 4
        elif not fastest:
            vector = _vector(dims, count, offset)
            dim0 //= vector
    most = _MAX_THREADS // vector
    width_limit, height_limit = (_power(dim) if dim < most else most for dim in (dim0, dim1))
    width = min(width_limit, _WARP)
    height = min(height_limit, most // width)
    width = min(width_limit, most // height)
    if fastest:
        step_input *= width
    else:
        step_output *= width
    if _up(inputs, step_input) < min(height * 16, _MAX_VALUES):
        return None
    step_input *= height
    values = _up(inputs, step_input)
    target = build.multiprocessors * (build.threads // (width * height))
    grid = _up(outputs // vector, step_output)
    if values < _MAX_VALUES or grid > target:
        return None
    blocks = max(min(_up(target, grid), _up(values, _MIN_VALUES)), _up(values, _MAX_VALUES))
    if blocks <= 1:
        return None
    return accumulator * outputs * blocks * (1 if fastest else width * vector), 4 * grid
