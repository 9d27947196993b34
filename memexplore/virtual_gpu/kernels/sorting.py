"""Request the memory of sorting, selecting and scanning: sort, topk, median, cumsum and cumprod.

Sources are below aten/src/ATen/native; cub.py has the scratch of cub's algorithms.
"""

from __future__ import annotations

from typing import Any

import torch

from memexplore.virtual_gpu.kernels import cub, cuda_build
from memexplore.virtual_gpu.kernels.plan import Free, OpRunner, Requests, Scratch, argument, nbytes, new_outputs
from memexplore.virtual_gpu.kernels.table import Kind, rule
from memexplore.virtual_gpu.tensors.tensor import is_on_gpu

_aten = torch.ops.aten

_SMALL, _LARGE, _FEW = 4096, 1_000_000, 128
"""Values of a slice for the small sort (should_use_small_sort) and for a sort of its own, slices for one sort."""


class _Requests:
    """Requests with the numbers of their scratch."""

    def __init__(self, outputs: list[Any]) -> None:
        self.requests: Requests = new_outputs(outputs)
        self.count = 0

    def take(self, size: int) -> int:
        """Add a request for scratch; return its number."""
        self.requests.append(Scratch(size))
        self.count += 1
        return self.count - 1

    def use(self, size: int) -> None:
        """Add a request for scratch that is freed at once."""
        self.requests.append(Free(self.take(size)))


def _sort_of(args: Any, kwargs: Any) -> tuple[torch.Tensor, int]:
    source = args[0]
    dim = kwargs.get("dim", next((value for value in args[1:] if type(value) is int), -1))
    return source, dim


@rule(Kind.REQUESTS, "cuda/Sort.cpp", _aten.sort.default, _aten.sort.stable)
def sort(args: Any, kwargs: Any, outputs: list[Any]) -> Requests | None:
    """sort: indices that begin in order; beyond 4096 values a slice, copies with the sorted dimension last, and cub's.

    Source: sort_stable_cuda and sort_cuda_kernel in cuda/Sort.cpp, launch_stable_sort_kernel and the functions before
    it in cuda/SortStable.cu, sortKeyValueInplace in cuda/Sort.cu.
    """
    source, dim = _sort_of(args, kwargs)
    if not source.dim() or not source.numel():
        return None
    length, key = source.shape[dim], source.dtype.itemsize
    requests = _Requests(outputs)
    if length <= _SMALL:
        # One row of indices, which is then copied to every slice.
        requests.use(length * 8)
        return requests.requests
    count = source.numel()
    slices = count // length
    if source.stride(dim) != 1 or not source.is_contiguous():
        requests.take(nbytes(source))
        requests.take(nbytes(source))
        requests.take(count * 8)
    if slices == 1 or length >= _LARGE:
        requests.take(length * 8)
        for _ in range(slices):
            requests.use(cub.radix_sort(length, key, 8))
    elif slices < _FEW:
        # Pairs of a position and a slice: sorted by value, then by slice.
        requests.take(count * 8)
        requests.take(count * 8)
        keys = requests.take(nbytes(source))
        requests.use(cub.radix_sort(count, key, 8))
        requests.requests.append(Free(keys))
        requests.use(cub.radix_sort(count, 8, bits=max(1, (slices - 1).bit_length())))
    else:
        requests.take(count * 8)
        requests.use(cub.segmented_sort(count, key, 8))
    return requests.requests


_BLOCK, _DIGITS = 256, 256

_TOPK_SLICES = ((20, 20_000), (40, 10_000), (80, 8_000), (199, 5_000), (799, 3_000), (4000, 800))
"""Up to so many slices, so many values a slice make topk use several blocks (should_use_multiblock)."""


@rule(Kind.REQUESTS, "cuda/TensorTopK.cu", _aten.topk.default)
def topk(args: Any, kwargs: Any, outputs: list[Any]) -> Requests | None:
    """topk: of long slices, counts of digits for each block and slice, and scans of them, then the result's order.

    Source: should_use_multiblock, get_items_per_thread and mbtopk::launch in cuda/TensorTopK.cu; the order of more
    than one value is that of topk_out_with_sort's sort in place (TensorTopK.cpp), which needs no scratch up to 4096.
    """
    source = args[0]
    if not source.dim() or not source.numel():
        return None
    dim = argument(args, kwargs, 2, "dim", -1)
    length = source.shape[dim]
    slices = source.numel() // length
    least = next((values for most, values in _TOPK_SLICES if slices <= most), 400)
    if length < least:
        return None
    build = cuda_build.current()
    # Six blocks fit a multiprocessor: 65 536 registers, 40 for each thread.
    per_thread = -(-length * slices // (build.multiprocessors * 6 * _BLOCK))
    blocks = -(-length // (_BLOCK * max(4, min(per_thread, 64))))
    requests = _Requests(outputs)
    copy = [] if source.is_contiguous() else [nbytes(source)]
    sizes = (slices * source.dtype.itemsize, slices * 8, slices * 8, slices * blocks * _DIGITS * 2)
    for size in (*copy, *sizes, slices * _DIGITS * 4, slices * blocks * 4, slices * blocks * 4):
        requests.take(size)
    for _ in range(2):
        requests.use(cub.scan_by_key(slices * blocks, 4))
    return requests.requests


@rule(Kind.REQUESTS, "cuda/ScanUtils.cuh", _aten.cumsum.default, _aten.cumprod.default)
def cumulative(args: Any, kwargs: Any, outputs: list[Any]) -> Requests | None:
    """cumsum, cumprod: a copy in the result's dtype (impl_func_cum_ops in ReduceOps.cpp); one slice is cub's scan.

    Source of the latter: scan_dim in cuda/ScanUtils.cuh.
    """
    source, dim = args[0], args[1]
    dtype = outputs[0].dtype
    requests = _Requests(outputs)
    if source.dtype is not dtype:
        requests.take(nbytes(source, dtype))
    if source.dim() and source.numel() and source.shape[dim] == source.numel():
        requests.use(cub.scan(source.numel(), dtype.itemsize, dtype not in (torch.float16, torch.bfloat16)))
    return requests.requests if requests.count else None


@rule(Kind.OPS, "cuda/Sorting.cpp", _aten.median.default, _aten.nanmedian.default)
def median(runner: OpRunner, func: Any, args: Any, kwargs: Any) -> Any:
    """Median of all values, from their order: median_impl in cuda/Sorting.cpp.

    median takes the middle value, or not-a-number, which sorts last; nanmedian counts those first.
    """
    source = args[0]
    if not is_on_gpu(source) or not source.numel():
        return NotImplemented
    with runner:
        ordered = _aten.sort.default(source.flatten())[0]
        if func is _aten.median.default:
            last = ordered[-1]
            return torch.where(last.isnan(), last, ordered[(source.numel() - 1) // 2])
        position = (source.numel() - 1 - ordered.isnan().sum()) / 2
        return ordered.index_select(0, position.to(torch.int64).reshape(1)).squeeze(0)
