"""What reading and writing by index requests: indices are brought to the device; to sum by them, they are sorted."""

from __future__ import annotations

import math
from typing import Any

import torch

from memexplore.virtual_gpu.dispatch.plans import Free, New, Output, Scratch
from memexplore.virtual_gpu.kernels.shapes import Requests, accumulator, given, nbytes, places

_BY_MAXIMUM = 2
"""EmbeddingBagMode::MAX."""


def sort_size(count: int, value: int) -> int:
    """Bytes of cub's scratch for sorting pairs of 64-bit keys and values.

    One tile (1 byte, recorded for 2048) holds 2304 pairs; beyond that copies of both, and tables that are estimated.
    Source: cub/device/dispatch/dispatch_radix_sort.cuh, tuning for compute capability 6.0 and later.

    >>> sort_size(2048, 8)
    1
    """
    if count <= 2304:
        return 1
    tiles = -(-count // 4608)
    return count * (8 + value) + tiles * 1024 + 16 * 1024


def read(args: Any, kwargs: Any, outputs: list[Any]) -> Requests | None:
    """Reading by index: first the indices are copied where they are on the CPU or int32."""
    copies = _copies(args[1])
    return [*copies, *places(outputs)] if copies else None


def _copies(indices: Any) -> Requests:
    """make_info in TensorAdvancedIndexing.cpp: indices are broadcast, brought to the device, then made int64.

    Masks are left out: what they select is made into indices before.
    """
    written = [index for index in indices if index is not None]
    if any(index.dtype in (torch.bool, torch.uint8) for index in written):
        return []
    count = math.prod(torch.broadcast_shapes(*(index.shape for index in written)))
    found: Requests = [Scratch(count * index.dtype.itemsize) for index in written if _is_on_cpu(index)]
    moved = 0
    for index in written:
        if index.dtype is torch.int32:
            found.append(Scratch(count * 8))
        if _is_on_cpu(index):
            if index.dtype is torch.int32:
                found.append(Free(moved))
            moved += 1
    return found


def _is_on_cpu(index: torch.Tensor) -> bool:
    return bool(getattr(index, "host", True))


def put(args: Any, kwargs: Any, outputs: list[Any]) -> Requests | None:
    """Accumulating: linear indices, then sorted with their order (index_put_with_sort_kernel, cuda/Indexing.cu).

    Order and sizes as recorded with torch 2.6 and 2.11, with one index and with two, the first of them on the CPU: it
    is wrapped and scaled there and then copied (computeLinearIndex). Where the indices are checked (called by the
    user), their extremes are read first (wrapIndexOnce in cuda/IndexKernelUtils or Indexing.cu).
    """
    target, indices, source = args[:3]
    first: Requests = [*places(outputs)]
    if not given(args, kwargs, 3, "accumulate", False):
        copies = _copies(indices)
        return [*first, *copies] if copies else None
    unsafe = given(args, kwargs, 4, "unsafe", False)
    written = [index for index in indices if index is not None and index.dtype is not torch.bool]
    if not written:
        return None
    count = math.prod(torch.broadcast_shapes(*(index.shape for index in written)))
    size = count * 8
    found = first
    number = 0

    def take(size: int) -> int:
        nonlocal number
        found.append(Scratch(size))
        number += 1
        return number - 1

    # Before they are broadcast, and those on the CPU stay there.
    longer = [take(index.numel() * 8) for index in written if index.dtype is torch.int32 and not _is_on_cpu(index)]
    for at, index in enumerate(written):
        if _is_on_cpu(index):
            scaled = take(size)
        else:
            if not unsafe:
                found += [Scratch(8), Free(number), Scratch(8), Free(number + 1)]
                number += 2
            wrapped = take(size)
            scaled = take(size)
            found.append(Free(wrapped))
        if at:
            found.append(Free(scaled))  # added to the first one in place
    found += [Free(number) for number in longer]
    slices = max(target.numel() // max(math.prod(target.shape[: len(indices)]), 1), 1)
    if source.numel() < count * slices or not source.is_contiguous():
        take(count * slices * source.dtype.itemsize)
    for _ in range(2):
        take(size)
    order = take(size)
    scratch = take(sort_size(count, 8))
    return [*found, Free(scratch), Free(order)]


def embedding_backward(args: Any, kwargs: Any, outputs: list[Any]) -> Requests | None:
    """Beyond 3072 indices they are sorted and partial sums kept: cuda/Embedding.cu, cuda/EmbeddingBackwardKernel.cu."""
    gradient, indices, rows, _, by_frequency = args[:5]
    count = indices.numel()
    if count <= 3072 and not by_frequency:
        return [Scratch(nbytes(gradient)), Output(0)] if not gradient.is_contiguous() else None
    return _summed_by_row(gradient, indices, rows, by_frequency)


def bag(args: Any, kwargs: Any, outputs: list[Any]) -> Requests:
    """_embedding_bag_cuda in cuda/EmbeddingBag.cu: sizes and owners of the bags before the result."""
    return [Output(number) for number in (2, 1, 0, 3) if type(outputs[number]) is New]


def bag_backward(args: Any, kwargs: Any, outputs: list[Any]) -> Requests | None:
    """_embedding_bag_dense_backward_cuda in cuda/EmbeddingBag.cu: always sorted, but where the maximum was taken."""
    gradient, indices, rows, by_frequency, kind = args[0], args[1], args[6], args[7], args[8]
    if kind == _BY_MAXIMUM or not indices.numel():
        return [Scratch(nbytes(gradient)), Output(0)] if not gradient.is_contiguous() else None
    return _summed_by_row(gradient, indices, rows, by_frequency)


def _summed_by_row(gradient: torch.Tensor, indices: torch.Tensor, rows: int, by_frequency: bool) -> Requests:
    """Indices are sorted, then rows of the gradient summed for each: embedding_backward_cuda_kernel."""
    count = indices.numel()
    width = gradient.shape[-1]
    number = indices.dtype.itemsize
    segments = min(count, rows)
    partial = count // 10 + segments
    found: Requests = [] if gradient.is_contiguous() else [Scratch(nbytes(gradient))]
    start = len(found)
    found += [Scratch(count * number) for _ in range(3)]
    found += [Scratch(sort_size(count, number)), Free(start + 3), Free(start + 2)]
    if by_frequency:
        found.append(Scratch(count * number))
    after = sum(type(entry) is Scratch for entry in found)
    found += [Output(0), Scratch(count * number), Scratch(8)]
    found += [Scratch(_scan_size(count)), Free(after + 2), Scratch(segments * number), Scratch(segments * number)]
    found += [Scratch(_scan_size(segments)), Free(after + 5), Scratch(8), Scratch(partial * number)]
    found.append(Scratch(partial * width * accumulator(gradient.dtype)))
    return found


def _scan_size(count: int) -> int:
    """An estimate of cub's scratch for a scan or selection: 16 bytes for each tile, rounded."""
    return 767 + 16 * (count // 1920)
