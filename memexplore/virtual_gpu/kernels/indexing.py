"""Request the memory of reading and writing by index, and of embeddings: copies of indices, sort buffers, partial sums.

Indices on the CPU are copied to the GPU; kernels that sum by index sort the indices first. Sources are below
aten/src/ATen/native.
"""

from __future__ import annotations

import math
from typing import Any

import torch

from memexplore.virtual_gpu.kernels import cub, cuda_build
from memexplore.virtual_gpu.kernels.plan import (
    Free,
    NewTensor,
    Output,
    Requests,
    Scratch,
    accumulator_bytes,
    argument,
    nbytes,
    new_outputs,
)
from memexplore.virtual_gpu.kernels.table import Kind, rule

_aten = torch.ops.aten

_BY_MAXIMUM = 2
"""EmbeddingBagMode::MAX."""


def nonzero(count: int, result: Requests, first: int = 0, selects: bool = True) -> Requests:
    """Return the requests for the indices of nonzero elements among `count`: how many there are, then a selection.

    `result` is the request for the indices, `first` the number of the first scratch, `selects` whether there is a
    selection.
    Source: nonzero_cuda_out_impl in cuda/Nonzero.cu.
    """
    requests: Requests = [Scratch(4), Scratch(cub.reduce(count)), Free(first + 1), *result]
    if not selects:
        return [*requests, Free(first)]
    number = first + 2 + sum(type(entry) is Scratch for entry in result)
    return [*requests, Scratch(cub.select(count, flagged=True)), Free(number), Free(first)]


@rule(Kind.REQUESTS, "TensorAdvancedIndexing.cpp", _aten.index.Tensor)
def read(args: Any, kwargs: Any, outputs: list[Any]) -> Requests | None:
    """index: indices on the CPU or of int32 are copied before the result is allocated."""
    copies = _copies(args[1])
    return [*copies, *new_outputs(outputs)] if copies else None


def _copies(indices: Any) -> Requests:
    """Copies of indices, which are broadcast, moved to the GPU and converted to int64.

    Source: make_info in TensorAdvancedIndexing.cpp. None for masks, which were converted to indices before.
    """
    written = [index for index in indices if index is not None]
    if any(index.dtype in (torch.bool, torch.uint8) for index in written):
        return []
    count = math.prod(torch.broadcast_shapes(*(index.shape for index in written)))
    requests: Requests = [Scratch(count * index.dtype.itemsize) for index in written if _is_on_cpu(index)]
    moved = 0
    for index in written:
        if index.dtype is torch.int32:
            requests.append(Scratch(count * 8))
        if _is_on_cpu(index):
            if index.dtype is torch.int32:
                requests.append(Free(moved))
            moved += 1
    return requests


def _is_on_cpu(index: torch.Tensor) -> bool:
    return index.is_cpu


@rule(
    Kind.REQUESTS, "cuda/Indexing.cu", _aten.index_put.default, _aten.index_put_.default, _aten._index_put_impl_.default
)
def put(args: Any, kwargs: Any, outputs: list[Any]) -> Requests | None:
    """index_put: with accumulate=True linear indices, sorted together with their order.

    Source: index_put_with_sort_kernel in cuda/Indexing.cu. Order and sizes as recorded with torch 2.6 and 2.11, with
    one index and with two, the first of them on the CPU: it is wrapped and scaled there and then copied
    (computeLinearIndex). If the indices are checked (a call of the user), their extremes are read first (wrapIndexOnce
    in cuda/IndexKernelUtils or Indexing.cu).
    """
    target, indices, source = args[:3]
    first: Requests = [*new_outputs(outputs)]
    masks = [index for index in indices if index is not None and index.dtype in (torch.bool, torch.uint8)]
    if masks and all(not _is_on_cpu(mask) for mask in masks):
        return [*first, *_indices_of(masks, target, source)]
    if not argument(args, kwargs, 3, "accumulate", False):
        copies = _copies(indices)
        return [*first, *copies] if copies else None
    written = [index for index in indices if index is not None and index.dtype is not torch.bool]
    if not written:
        return None
    count = math.prod(torch.broadcast_shapes(*(index.shape for index in written)))
    size = count * 8
    scratch = _ScratchInOrder(first)
    _linear_index(scratch, written, size, checks=not argument(args, kwargs, 4, "unsafe", False))
    slices = max(target.numel() // max(math.prod(target.shape[: len(indices)]), 1), 1)
    largest = max(target.numel() - 1, 0) // slices
    if source.numel() < count * slices or not source.is_contiguous():
        scratch.take(count * slices * source.dtype.itemsize)
    for _ in range(2):
        scratch.take(size)
    order = scratch.take(size)
    sorting = scratch.take(cub.radix_sort(count, 8, 8, max(largest.bit_length(), 1)))
    scratch.free(sorting)
    scratch.free(order)
    return scratch.requests


class _ScratchInOrder:
    """Requests of an op, to which scratch memory is added; what is not freed stays until the op ends."""

    def __init__(self, requests: Requests) -> None:
        self.requests = requests
        self._count = 0

    def take(self, size: int) -> int:
        """Request bytes, and return the number by which they can be freed."""
        self.requests.append(Scratch(size))
        self._count += 1
        return self._count - 1

    def free(self, number: int) -> None:
        self.requests.append(Free(number))


def _linear_index(scratch: _ScratchInOrder, written: list[torch.Tensor], size: int, checks: bool) -> None:
    """Request the index of `size` bytes into the flat target (computeLinearIndex), of each index and of their sum."""
    # int32 indices are converted before they are broadcast, those on the CPU on the CPU.
    on_gpu = [index for index in written if not _is_on_cpu(index)]
    converted = [scratch.take(index.numel() * 8) for index in on_gpu if index.dtype is torch.int32]
    for position, index in enumerate(written):
        if _is_on_cpu(index):
            scaled = scratch.take(size)
        else:
            if checks:
                _check_extremes(scratch)
            wrapped = scratch.take(size)
            scaled = scratch.take(size)
            scratch.free(wrapped)
        if position:
            scratch.free(scaled)  # added to the first index in place
    for number in converted:
        scratch.free(number)


def _check_extremes(scratch: _ScratchInOrder) -> None:
    """Request the largest and the smallest entry of an index, which are compared with the bounds."""
    for _ in range(2):
        extreme = scratch.take(8)
        if cuda_build.current().release >= (2, 11):
            # Compared on the GPU: _assert_async, as measured with torch 2.11.
            scratch.free(scratch.take(1))
        scratch.free(extreme)


def _indices_of(masks: list[torch.Tensor], target: torch.Tensor, source: torch.Tensor) -> Requests:
    """Indices of masks: expandTensors in IndexingUtils.h. As many elements as there are values, all for one value."""
    requests: Requests = []
    number = 0
    for mask in masks:
        size = mask.numel()
        width = max(target.numel() // max(size, 1), 1)
        count = min(source.numel() // width, size) if source.numel() > width else size
        result: Requests = [Scratch(8 * count * mask.dim())] if count and mask.dim() else []
        requests += nonzero(size, result, number)
        number += 3 + len(result)
    return requests


@rule(Kind.REQUESTS, "Embedding.cpp", _aten.embedding.default)
def embedding(args: Any, kwargs: Any, outputs: list[Any]) -> Requests | None:
    """A copy of indices that are not contiguous, before the result: `indices.reshape(-1)` in Embedding.cpp."""
    indices = args[1]
    return None if indices.is_contiguous() else [Scratch(nbytes(indices)), Output(0)]


@rule(Kind.REQUESTS, "cuda/Embedding.cu", _aten.embedding_dense_backward.default)
def embedding_backward(args: Any, kwargs: Any, outputs: list[Any]) -> Requests | None:
    """Beyond 3072 indices: sort, then partial sums (cuda/Embedding.cu, cuda/EmbeddingBackwardKernel.cu)."""
    gradient, indices, rows, _, by_frequency = args[:5]
    count = indices.numel()
    if count <= 3072 and not by_frequency:
        return [Scratch(nbytes(gradient)), Output(0)] if not gradient.is_contiguous() else None
    return _summed_by_row(gradient, indices, rows, by_frequency)


@rule(Kind.REQUESTS, "cuda/EmbeddingBag.cu", _aten._embedding_bag.default, _aten._embedding_bag_forward_only.default)
def embedding_bag(args: Any, kwargs: Any, outputs: list[Any]) -> Requests:
    """Sizes of the bags and the bag of each index before the result: _embedding_bag_cuda in cuda/EmbeddingBag.cu."""
    return [Output(number) for number in (2, 1, 0, 3) if type(outputs[number]) is NewTensor]


@rule(Kind.REQUESTS, "cuda/EmbeddingBag.cu", _aten._embedding_bag_backward.default)
def embedding_bag_backward(args: Any, kwargs: Any, outputs: list[Any]) -> Requests | None:
    """Sorted for sums and means: _embedding_bag_dense_backward_cuda in cuda/EmbeddingBag.cu."""
    gradient, indices, rows, by_frequency, kind = args[0], args[1], args[6], args[7], args[8]
    if kind == _BY_MAXIMUM or not indices.numel():
        return [Scratch(nbytes(gradient)), Output(0)] if not gradient.is_contiguous() else None
    return _summed_by_row(gradient, indices, rows, by_frequency)


def _summed_by_row(gradient: torch.Tensor, indices: torch.Tensor, rows: int, by_frequency: bool) -> Requests:
    """Indices are sorted, then gradient rows of equal indices summed: embedding_backward_cuda_kernel."""
    count = indices.numel()
    width = gradient.shape[-1]
    item = indices.dtype.itemsize
    segments = min(count, rows)
    partial = count // 10 + segments
    requests: Requests = [] if gradient.is_contiguous() else [Scratch(nbytes(gradient))]
    start = len(requests)
    requests += [Scratch(count * item) for _ in range(3)]
    requests += [Scratch(cub.radix_sort(count, item, item)), Free(start + 3), Free(start + 2)]
    if by_frequency:
        requests.append(Scratch(count * item))
        if cuda_build.current().release >= (2, 11):
            for _ in range(2):
                requests += [Scratch(cub.scan_by_key(count, item)), Free(sum(type(e) is Scratch for e in requests))]
    after = sum(type(entry) is Scratch for entry in requests)
    requests += [Output(0), Scratch(count * item), Scratch(8)]
    if cuda_build.current().release >= (2, 11):
        # unique_by_key of cub writes the unique keys too, as measured with torch 2.11.
        requests += [Scratch(count * item), Scratch(cub.unique_by_key(count)), Free(after + 3), Free(after + 2)]
        after += 1
    else:
        requests += [Scratch(_old_scan_size(count)), Free(after + 2)]
    requests += [Scratch(segments * item), Scratch(segments * item)]
    release = cuda_build.current().release
    scan = cub.scan(segments, item) if release >= (2, 11) else _old_scan_size(segments)
    requests += [Scratch(scan), Free(after + 5), Scratch(8), Scratch(partial * item)]
    requests.append(Scratch(partial * width * accumulator_bytes(gradient.dtype)))
    return requests


def _old_scan_size(count: int) -> int:
    """Return the bytes of cub's scratch for a scan or a selection before CUDA 13, as recorded with torch 2.6."""
    return 767 + 16 * (count // 1920)


@rule(Kind.REQUESTS, "cuda/IndexKernel.cu", _aten.masked_scatter.default, _aten.masked_scatter_.default)
def masked_scatter(args: Any, kwargs: Any, outputs: list[Any]) -> Requests:
    """Positions of the mask's elements by a scan: launch_masked_scatter_kernel in cuda/IndexKernel.cu."""
    target, mask = args[:2]
    shape = torch.broadcast_shapes(target.shape, mask.shape)
    count = math.prod(shape)
    copy = [Scratch(count)] if mask.shape != shape or not mask.is_contiguous() else []
    return [*new_outputs(outputs), Scratch(8 * count), *copy, Scratch(cub.scan(count, 8))]


@rule(Kind.COMPOSITE, "Onehot.cpp", _aten.one_hot.default)
def one_hot(tensor: torch.Tensor, classes: int = -1) -> torch.Tensor:
    """Scatter ones into zeros; the values are not checked: Onehot.cpp."""
    if classes < 0:
        classes = int(tensor.max().item()) + 1
    result = torch.zeros((*tensor.shape, classes), dtype=torch.int64, device=tensor.device)
    return result.scatter_(-1, tensor.unsqueeze(-1), 1)


@rule(Kind.FAKE, "TensorAdvancedIndexing.cpp", _aten._index_put_impl_.default)
def put_into(target: torch.Tensor, *_: Any) -> torch.Tensor:
    """Return the tensor that is written to: torch's fake kernel refuses indices on the CPU, which CUDA accepts."""
    return target
