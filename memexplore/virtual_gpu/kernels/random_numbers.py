"""Request the memory of kernels that draw random numbers: dropout, multinomial, randperm.

Sources are below aten/src/ATen/native.
"""

from __future__ import annotations

import math
from typing import Any

import torch

from memexplore.virtual_gpu.kernels import cub, cuda_build, reductions
from memexplore.virtual_gpu.kernels.composite_dispatch import decomposed
from memexplore.virtual_gpu.kernels.plan import Free, NewTensor, Output, Requests, Scratch, argument, nbytes
from memexplore.virtual_gpu.kernels.table import Kind, rule

_aten = torch.ops.aten


@rule(Kind.COMPOSITE, "Dropout.cpp", _aten.dropout.default)
def dropout(tensor: torch.Tensor, p: float, train: bool) -> torch.Tensor:
    """The fused kernel wherever 0 < p < 1: Dropout.cpp."""
    if train and 0 < p < 1 and tensor.numel():
        return _aten.native_dropout(tensor, p, train)[0]
    return decomposed(_aten.dropout.default, tensor, p, train)


@rule(Kind.REQUESTS, "cuda/Dropout.cu", _aten.native_dropout.default)
def fused_dropout(args: Any, kwargs: Any, outputs: list[Any]) -> Requests:
    """The mask, then the result: dropout_cuda in cuda/Dropout.cu, order as recorded with torch 2.1.

    native_dropout_cuda has a short cut where all or nothing is dropped, which makes the result first.
    """
    p, train = args[1], argument(args, kwargs, 2, "train")
    return [Output(0), Output(1)] if train is False or p == 1 else [Output(1), Output(0)]


@rule(Kind.REQUESTS, "Distributions.cpp", _aten.multinomial.default)
def multinomial(args: Any, kwargs: Any, outputs: list[Any]) -> Requests | None:
    """One sample, or several without replacement: exponential noise of the input's size (Distributions.cpp)."""
    weights, samples = args[:2]
    if samples != 1 and argument(args, kwargs, 2, "replacement", False):
        return None
    if cuda_build.current().release >= (2, 11):
        return _checked_on_gpu(weights, samples)
    # Each of the three checks of the weights makes masks and one flag; the noise is divided by in place.
    size = weights.numel()
    return [Scratch(size), Scratch(size), Free(0), Free(1), Scratch(nbytes(weights)), Output(0)]


def _checked_on_gpu(weights: torch.Tensor, samples: int) -> Requests:
    """The result, checks of the largest, the smallest and the sums of the weights, noise, and the largest values of it.

    The checks run on the GPU, as measured with torch 2.11.
    """
    item = weights.dtype.itemsize
    requests: Requests = [Output(0)]
    count = 0

    def take(*sizes: int) -> list[int]:
        nonlocal count
        requests.extend(Scratch(size) for size in sizes)
        count += len(sizes)
        return list(range(count - len(sizes), count))

    extremes = []
    for _ in range(2):
        extremes += take(item)
        buffer = take(*(request.size for request in reductions.requests(weights, None, item)))  # type: ignore[union-attr]
        requests.extend(Free(number) for number in reversed(buffer))
        extremes += take(1)
    take(1)
    requests.extend(Free(number) for number in reversed(extremes))
    rows = weights.numel() // weights.shape[-1]
    sums = take(rows * item, rows)
    if weights.dim() > 1:
        take(1)
    requests.extend(Free(number) for number in reversed(sums))
    requests.extend(Free(number) for number in take(1))
    take(nbytes(weights))
    if samples > 1:
        take(rows * samples * item)
    return requests


@rule(Kind.REQUESTS, "cuda/Randperm.cu", _aten.randperm.default, _aten.randperm.generator)
def permutation(args: Any, kwargs: Any, outputs: list[Any]) -> Requests | None:
    """randperm: indices in order and random keys, sorted together: randperm_out_cuda in cuda/Randperm.cu.

    Keys have as many bits as make two equal ones unlikely. Fewer than 30 000 indices were permuted on the CPU in
    earlier releases than those measured (2.11).
    """
    count = args[0]
    if not isinstance(count, int) or not count or type(outputs[0]) is not NewTensor:
        return None
    if cuda_build.current().release < (2, 11) and count < 30_000:
        return None
    bits = min(64, math.ceil(math.log2(count - (6 * count * count + 1) / (12 * math.log(0.9)))))
    key, item = 4 if bits <= 32 else 8, outputs[0].dtype.itemsize
    requests: Requests = [Output(0), Scratch(8), Free(0), Scratch(count * item)]
    requests += [Scratch(count * key), Scratch(count * key)]
    return [*requests, Scratch(cub.radix_sort(count, key, item, bits))]


@rule(
    Kind.FAKE,
    "Distributions.cpp",
    *(_aten.cauchy_.default, _aten.exponential_.default, _aten.geometric_.default, _aten.log_normal_.default),
)
def drawn_in_place(target: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
    """Return the tensor that is filled: torch's fake kernels refuse a generator."""
    return target
