"""Request the memory of loss functions: unreduced losses, reduction buffers, intermediate terms.

Sources are below aten/src/ATen/native.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch

from memexplore.virtual_gpu.kernels import cuda_build, reductions
from memexplore.virtual_gpu.kernels.plan import (
    Free,
    NewTensor,
    Output,
    Plan,
    Requests,
    Scratch,
    argument,
    nbytes,
    new_outputs,
)
from memexplore.virtual_gpu.kernels.table import Kind, rule

_aten = torch.ops.aten

_MEAN = 1
"""at::Reduction::Mean; 0 is None, 2 is Sum."""


@rule(Kind.REQUESTS, "Loss.cpp", _aten.mse_loss.default, _aten.smooth_l1_loss.default)
def pointwise(args: Any, kwargs: Any, outputs: list[Any]) -> Requests | None:
    """mse_loss and smooth_l1_loss: the unreduced loss is a temporary (mse_loss_out, smooth_l1_loss_out in Loss.cpp).

    The result gets the memory of an unreduced loss too and keeps it: the meta functions in Loss.cpp build it with the
    shape of the inputs and then resize it to one number, which leaves its storage as it is.
    """
    if argument(args, kwargs, 2, "reduction", _MEAN) == 0:
        return None
    shape = torch.broadcast_shapes(args[0].shape, args[1].shape)
    unreduced = math.prod(shape) * outputs[0].dtype.itemsize
    outputs[0] = outputs[0]._replace(size=unreduced)
    return [*new_outputs(outputs), Scratch(unreduced), *_full_reduction(shape)]


def _full_reduction(shape: Sequence[int]) -> Requests:
    """The scratch of reducing a contiguous float tensor to one number."""
    strides = torch.empty(tuple(shape), device="meta").stride()
    buffer = reductions.scratch(shape, strides, (), 4, cuda_build.current())
    return [] if buffer is None else [Scratch(size) for size in buffer]


@rule(Kind.REQUESTS, "cuda/MultiMarginLoss.cu", _aten.multi_margin_loss.default)
def multi_margin(args: Any, kwargs: Any, outputs: list[Any]) -> Requests | None:
    """multi_margin_loss: a loss for each row before they are reduced (multi_margin_loss_cuda_out)."""
    source = args[0]
    if source.dim() < 2 or argument(args, kwargs, 5, "reduction", _MEAN) == 0:
        return None
    return [*new_outputs(outputs), Scratch(source.shape[0] * source.dtype.itemsize)]


@rule(Kind.REQUESTS, "Loss.cpp", _aten.huber_loss.default)
def huber(args: Any, kwargs: Any, outputs: list[Any]) -> Requests | None:
    """huber_loss allocates the unreduced loss before the result: Loss.cpp."""
    if argument(args, kwargs, 2, "reduction", _MEAN) == 0:
        return None
    shape = torch.broadcast_shapes(args[0].shape, args[1].shape)
    return [Scratch(math.prod(shape) * outputs[0].dtype.itemsize), Output(0), *_full_reduction(shape)]


@rule(Kind.REQUESTS, "Loss.cpp", _aten.binary_cross_entropy_with_logits.default)
def binary_with_logits(args: Any, kwargs: Any, outputs: list[Any]) -> Requests:
    """(1 - target) * input - log_sigmoid(input), then its mean or sum: Loss.cpp, order as recorded with torch 2.4."""
    source, target = args[:2]
    pos_weight = argument(args, kwargs, 3, "pos_weight")
    reduction = argument(args, kwargs, 4, "reduction", _MEAN)
    size = nbytes(source)
    first = Output(0) if reduction == 0 else Scratch(size)
    scratch = int(reduction != 0)
    if pos_weight is None:
        requests: Requests = [first, Scratch(size)]
        if cuda_build.current().release < (2, 11):
            # Later the logarithm stays until the end, as measured with torch 2.11.
            requests.append(Free(scratch))
    else:
        weight = math.prod(torch.broadcast_shapes(pos_weight.shape, target.shape)) * source.dtype.itemsize
        requests = [Scratch(nbytes(pos_weight)), Scratch(weight), Free(0), first, Scratch(size)]
        requests += [Free(2 + scratch), Free(1)]
    return requests if reduction == 0 else [*requests, Output(0), *_full_reduction(source.shape)]


@rule(Kind.REQUESTS, "cuda/NLLLoss2d.cu", _aten.nll_loss2d_forward.default)
def negative_log_likelihood_2d(args: Any, kwargs: Any, outputs: list[Any]) -> Requests:
    """nll_loss2d_forward allocates total_weight before it resizes the output: cuda/NLLLoss2d.cu."""
    return [Output(1), Output(0)]


@rule(Kind.PLAN, "cuda/Loss.cu", _aten.binary_cross_entropy.default)
def binary(args: Any, kwargs: Any) -> Plan:
    """The reduced loss is the unreduced loss's storage, resized: binary_cross_entropy_cuda in cuda/Loss.cu."""
    source = args[0]
    reduction = argument(args, kwargs, 3, "reduction", _MEAN)
    size = nbytes(source)
    if reduction == 0:
        return Plan([NewTensor(tuple(source.shape), source.stride(), 0, source.dtype, size, False)], None)
    requests: Requests = [Output(0), Scratch(source.dtype.itemsize), *_full_reduction(source.shape)]
    return Plan([NewTensor((), (), 0, source.dtype, size, False)], None, requests)
