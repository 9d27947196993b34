"""Request the memory of softmax and logsumexp, and run the branches of softmax that CUDA takes.

Sources are below aten/src/ATen/native.
"""

from __future__ import annotations

from typing import Any

import torch

from memexplore.virtual_gpu.kernels import cuda_build
from memexplore.virtual_gpu.kernels.composite_dispatch import decomposed
from memexplore.virtual_gpu.kernels.plan import OpRunner, Output, Requests, Scratch, argument, new_outputs
from memexplore.virtual_gpu.kernels.table import Kind, rule
from memexplore.virtual_gpu.tensors.tensor import is_on_gpu

_aten = torch.ops.aten


@rule(Kind.COMPOSITE, "SoftMax.cpp", _aten.softmax.int)
def softmax(tensor: torch.Tensor, dim: int, dtype: torch.dtype | None = None) -> torch.Tensor:
    """One kernel from half precision to float32: SoftMax.cpp."""
    if tensor.dtype is torch.float16 and dtype is torch.float32:
        return _aten._softmax(tensor, dim, True)
    return decomposed(_aten.softmax.int, tensor, dim, dtype)


@rule(Kind.COMPOSITE, "SoftMax.cpp", _aten.log_softmax.int)
def log_softmax(tensor: torch.Tensor, dim: int, dtype: torch.dtype | None = None) -> torch.Tensor:
    """One kernel from half precision to float32: SoftMax.cpp."""
    if tensor.dtype is torch.float16 and dtype is torch.float32:
        return _aten._log_softmax(tensor, dim, True)
    return decomposed(_aten.log_softmax.int, tensor, dim, dtype)


@rule(Kind.REQUESTS, "cuda/SoftMax.cu", _aten._softmax_backward_data.default)
def softmax_backward(args: Any, kwargs: Any, outputs: list[Any]) -> Requests | None:
    """The product of gradient and result, after the gradient of the input: softmax_backward_cuda_out in SoftMax.cu.

    As measured with torch 2.11 on an H100.
    """
    gradient, result = args[:2]
    if not gradient.numel():
        return None
    dtype = torch.promote_types(gradient.dtype, result.dtype)
    return [*new_outputs(outputs), Scratch(gradient.numel() * dtype.itemsize)]


@rule(Kind.REQUESTS, "transformers/attention.cpp", _aten._safe_softmax.default)
def safe_softmax(args: Any, kwargs: Any, outputs: list[Any]) -> Requests:
    """softmax, then zeros in rows that are -inf throughout: _safe_softmax in transformers/attention.cpp."""
    source, dim = args[:2]
    size, item = outputs[0].size, outputs[0].dtype.itemsize
    rows = source.numel() // max(source.shape[dim], 1)
    if cuda_build.current().release >= (2, 11):
        # Compared with a number and written in place, as measured with torch 2.11.
        return [Output(0), Scratch(source.numel()), Scratch(rows), Scratch(item)]
    return [Scratch(size), Scratch(item), Scratch(source.numel()), Scratch(rows), Scratch(item), Output(0)]


@rule(Kind.OPS, "ReduceOps.cpp", _aten.logsumexp.default)
def logsumexp(runner: OpRunner, func: Any, args: Any, kwargs: Any) -> Any:
    """Maxima, exponentials of the differences, their sum: logsumexp_out_impl in ReduceOps.cpp."""
    source, dims = args[:2]
    keepdim = argument(args, kwargs, 2, "keepdim", False)
    if not is_on_gpu(source) or not source.numel() or not source.dtype.is_floating_point:
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
