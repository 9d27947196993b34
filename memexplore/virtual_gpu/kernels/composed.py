"""Ops whose CUDA implementation calls other ops, written as those calls, and ops that keep a buffer of another size.

In: the op's arguments. Out: its result, or `Requests`. Sources are below aten/src/ATen/native.
"""

from __future__ import annotations

import math
from typing import Any

import torch

from memexplore.virtual_gpu.kernels import cub
from memexplore.virtual_gpu.kernels.plan import Free, NewTensor, OpRunner, Output, Requests, Scratch
from memexplore.virtual_gpu.kernels.shapes import argument, nbytes, new_outputs
from memexplore.virtual_gpu.tensors.tensor import VirtualTensor

_aten = torch.ops.aten
_MOST_ROWS = 25
"""Rows of both operands from which `cdist` uses a matrix product (cdist_impl in Distance.cpp)."""


def _on_gpu(*tensors: Any) -> bool:
    return all(isinstance(tensor, VirtualTensor) and not tensor.host for tensor in tensors)


def logsumexp(runner: OpRunner, func: Any, args: Any, kwargs: Any) -> Any:
    """Maxima, exponentials of the differences, their sum: logsumexp_out_impl in ReduceOps.cpp."""
    source, dims = args[:2]
    keepdim = argument(args, kwargs, 2, "keepdim", False)
    if not _on_gpu(source) or not source.numel() or not source.dtype.is_floating_point:
        return NotImplemented
    with runner:
        maxima = _aten.amax.default(source, dims, True)
        if keepdim:
            squeezed = maxima
        else:
            squeezed = maxima.squeeze(tuple(dims)) if dims else maxima.squeeze()
        size = _aten.abs.default(squeezed)
        infinite = _aten.eq.Scalar(size, float("inf"))
        squeezed.masked_fill_(infinite, 0)
        del infinite, size
        exponentials = (source - maxima).exp_()
        result = _aten.sum.dim_IntList(exponentials, dims, keepdim)
        del exponentials
        return result.log_().add_(squeezed)


def euclidean_distance(runner: OpRunner, func: Any, args: Any, kwargs: Any) -> Any:
    """Distances as one matrix product of rows with their norms: _euclidean_dist in Distance.cpp."""
    first, second = args[:2]
    if not _on_gpu(first, second) or not first.numel() or not second.numel():
        return NotImplemented
    with runner:
        norms, ones = [], []
        for each in (first, second):
            norms.append(_aten.pow.Tensor_Scalar(each, 2).sum(-1, True))
            ones.append(torch.ones_like(norms[-1], memory_format=torch.contiguous_format))
        left = torch.cat([first.mul(-2), norms[0], ones[0]], -1)
        right = torch.cat([second, ones[1], norms[1]], -1)
        del norms, ones
        return left.matmul(right.mT).clamp_min_(0).sqrt_()


def distances(runner: OpRunner, func: Any, args: Any, kwargs: Any) -> Any:
    """_cdist_forward with a matrix product where it pays: cdist_impl in Distance.cpp."""
    first, second, p, mode = args[:4]
    many = max(first.shape[-2], second.shape[-2]) > _MOST_ROWS
    if p != 2 or not (mode == 1 or (mode in (0, None) and many)):
        return NotImplemented
    batch = torch.broadcast_shapes(first.shape[:-2], second.shape[:-2])
    with runner:
        operands = [each.expand((*batch, *each.shape[-2:])) for each in (first, second)]
        return euclidean_distance(runner, func, operands, {})


def is_infinite(runner: OpRunner, func: Any, args: Any, kwargs: Any) -> Any:
    """isinf: magnitudes, compared (TensorCompare.cpp)."""
    source = args[0]
    if not _on_gpu(source) or not source.dtype.is_floating_point:
        return NotImplemented
    with runner:
        return _aten.eq.Scalar(_aten.abs.default(source), float("inf"))


def is_close(runner: OpRunner, func: Any, args: Any, kwargs: Any) -> Any:
    """isclose: errors against the allowed ones where they are finite (TensorCompare.cpp)."""
    first, second = args[:2]
    rtol, atol = argument(args, kwargs, 2, "rtol", 1e-05), argument(args, kwargs, 3, "atol", 1e-08)
    plain = not argument(args, kwargs, 4, "equal_nan", False) and (rtol or atol)
    if not _on_gpu(first, second) or not first.dtype.is_floating_point or not plain:
        return NotImplemented
    with runner:
        close = first.eq(second)
        scaled = second.mul(rtol)
        size = scaled.abs()
        allowed = size.add(atol)
        del size, scaled
        error = first.sub(second).abs()
        below_infinity = error.abs().ne(float("inf"))
        finite = error.eq(error).mul(below_infinity)
        del below_infinity
        return close.logical_or_(finite.logical_and_(error.le(allowed)))


def count_nonzero(runner: OpRunner, func: Any, args: Any, kwargs: Any) -> Any:
    """count_nonzero: comparisons, summed (TensorAdvancedIndexing.cpp)."""
    source = args[0]
    dims = argument(args, kwargs, 1, "dim")
    dims = [] if dims is None else [dims] if isinstance(dims, int) else dims
    if not _on_gpu(source):
        return NotImplemented
    with runner:
        compared = source if source.dtype is torch.bool else _aten.ne.Scalar(source, 0)
        return _aten.sum.dim_IntList(compared, dims)


def distance(runner: OpRunner, func: Any, args: Any, kwargs: Any) -> Any:
    """dist: the norm of the difference (Distance.cpp)."""
    first, second = args[:2]
    if not _on_gpu(first, second):
        return NotImplemented
    with runner:
        return _aten.norm.Scalar(first - second, argument(args, kwargs, 2, "p", 2))


def check_errors(runner: OpRunner, func: Any, args: Any, kwargs: Any) -> Any:
    """_linalg_check_errors: whether any matrix of a solver failed (LinearAlgebra.cpp)."""
    if _on_gpu(args[0]):
        with runner:
            _aten.any.default(args[0])
    return NotImplemented


def roll(args: Any, kwargs: Any, outputs: list[Any]) -> Requests | None:
    """A copy for each dimension but the last, until the end: roll_common in TensorTransformations.h."""
    count = len(argument(args, kwargs, 1, "shifts"))
    if count < 2 or not args[0].numel():
        return None
    return [*(Scratch(nbytes(args[0])) for _ in range(count - 1)), *new_outputs(outputs)]


def begins_like_input(args: Any, kwargs: Any, outputs: list[Any]) -> Requests | None:
    """im2col, col2im: the result begins with the input's size and is resized, which keeps a larger storage.

    Source: im2col_cuda in cuda/Im2Col.cu and col2im_cuda in cuda/Col2Im.cu, `at::empty_like(input)`.
    """
    size = nbytes(args[0])
    if type(outputs[0]) is not NewTensor or not size:
        return None
    if outputs[0].size > size:
        return [Scratch(size), Output(0), Free(0)]
    outputs[0] = outputs[0]._replace(size=size)
    return None


def complex_to_real(args: Any, kwargs: Any, outputs: list[Any]) -> Requests | None:
    """abs and angle of complex values: a complex result, copied.

    Source: unary_op_impl_with_complex_to_float_out in UnaryOps.cpp.
    """
    if not args[0].dtype.is_complex or not outputs[0].size:
        return None
    return [*new_outputs(outputs), Scratch(nbytes(args[0]))]


_FFT_DIMS = 3
"""cufft_max_ndim in cuda/SpectralOps.cpp."""


def _in_one_transform(dims: Any) -> bool:
    """Return whether cuFFT transforms all dimensions at once: use_optimized_cufft_path in cuda/SpectralOps.cpp."""
    return len(dims) <= _FFT_DIMS and not (len(dims) >= 2 and list(dims[:2]) == [0, 1])


def real_to_complex(args: Any, kwargs: Any, outputs: list[Any]) -> Requests | None:
    """_fft_r2c: a second buffer for transforms of further dimensions (_fft_r2c_cufft in cuda/SpectralOps.cpp)."""
    if not outputs[0].size:
        return None
    further = _rearranged(args[0], args[1] if _in_one_transform(args[1]) else args[1][-1:])
    if not _in_one_transform(args[1]):
        further.append(Scratch(outputs[0].size))
    return [*new_outputs(outputs), *further] if further else None


def complex_to_real_transform(args: Any, kwargs: Any, outputs: list[Any]) -> Requests | None:
    """_fft_c2r: a copy of the input, which cuFFT overwrites (_fft_c2r_cufft in cuda/SpectralOps.cpp)."""
    copy = nbytes(args[0])
    if not copy:
        return None
    return [*new_outputs(outputs), Scratch(copy), *_rearranged(args[0], args[1])]


def _rearranged(source: torch.Tensor, dims: Any) -> Requests:
    """A copy with the transformed dimensions last, where they are not: _exec_fft in cuda/SpectralOps.cpp."""
    rank = source.dim()
    last = [dim % rank for dim in dims]
    others = sorted((dim for dim in range(rank) if dim not in last), key=lambda dim: (-source.stride()[dim], dim))
    ordered = torch.empty_strided(source.shape, source.stride(), device="meta").permute(*others, *last)
    try:
        ordered.view(-1, *(source.shape[dim] for dim in last))
    except RuntimeError:
        return [Scratch(nbytes(source))]
    return []


def complex_transform(args: Any, kwargs: Any, outputs: list[Any]) -> Requests | None:
    """_fft_c2c: a copy of input whose dimensions are in another order (_fft_c2c_cufft in cuda/SpectralOps.cpp)."""
    copy = _rearranged(args[0], args[1][-_FFT_DIMS:]) if args[1] and outputs[0].size else []
    return [*new_outputs(outputs), *copy] if copy else None


def masked_scatter(args: Any, kwargs: Any, outputs: list[Any]) -> Requests:
    """Positions of the mask's elements by a scan: launch_masked_scatter_kernel in cuda/IndexKernel.cu."""
    target, mask = args[:2]
    shape = torch.broadcast_shapes(target.shape, mask.shape)
    count = math.prod(shape)
    copy = [Scratch(count)] if mask.shape != shape or not mask.is_contiguous() else []
    return [*new_outputs(outputs), Scratch(8 * count), *copy, Scratch(cub.scan(count, 8))]


REQUESTS: list[tuple[Any, str, list[Any]]] = [
    (roll, "TensorTransformations.h", [_aten.roll.default]),
    (begins_like_input, "cuda/Im2Col.cu", [_aten.im2col.default]),
    (begins_like_input, "cuda/Col2Im.cu", [_aten.col2im.default]),
    (complex_to_real, "UnaryOps.cpp", [_aten.abs.default, _aten.angle.default]),
    (real_to_complex, "cuda/SpectralOps.cpp", [_aten._fft_r2c.default]),
    (complex_transform, "cuda/SpectralOps.cpp", [_aten._fft_c2c.default]),
    (complex_to_real_transform, "cuda/SpectralOps.cpp", [_aten._fft_c2r.default]),
    (
        masked_scatter,
        "cuda/IndexKernel.cu",
        [_aten.masked_scatter.default, _aten.masked_scatter_.default],
    ),
]
"""Rows of kind REQUESTS for the table of kernels."""

OPS: list[tuple[Any, str, list[Any]]] = [
    (is_infinite, "TensorCompare.cpp", [_aten.isinf.default]),
    (is_close, "TensorCompare.cpp", [_aten.isclose.default]),
    (
        count_nonzero,
        "TensorAdvancedIndexing.cpp",
        [_aten.count_nonzero.dim_IntList, _aten.count_nonzero.default],
    ),
    (distance, "Distance.cpp", [_aten.dist.default]),
    (check_errors, "LinearAlgebra.cpp", [_aten._linalg_check_errors.default]),
    (logsumexp, "ReduceOps.cpp", [_aten.logsumexp.default]),
    (euclidean_distance, "Distance.cpp", [_aten._euclidean_dist.default]),
    (distances, "Distance.cpp", [_aten._cdist_forward.default]),
]
"""Rows of kind OPS."""
