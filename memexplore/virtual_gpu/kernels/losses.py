"""What loss functions request beside their outputs."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch

from memexplore.virtual_gpu.dispatch.plans import Free, New, Output, Plan, Scratch
from memexplore.virtual_gpu.kernels import cuda_build, reductions
from memexplore.virtual_gpu.kernels.shapes import Requests, given, nbytes, places

_MEAN = 1


def pointwise(args: Any, kwargs: Any, outputs: list[Any]) -> Requests | None:
    """mse_loss and smooth_l1_loss: the unreduced loss is a temporary (BinaryOps.cpp, PointwiseOps: mse_loss_out)."""
    if given(args, kwargs, 2, "reduction", _MEAN) == 0:
        return None
    size = torch.broadcast_shapes(args[0].shape, args[1].shape)
    return [*places(outputs), Scratch(math.prod(size) * outputs[0].dtype.itemsize), *_whole(size)]


def _whole(shape: Sequence[int]) -> Requests:
    """The scratch of reducing a contiguous float tensor to one number."""
    strides = torch.empty(tuple(shape), device="meta").stride()
    buffer = reductions.scratch(shape, strides, (), 4, cuda_build.current())
    return [] if buffer is None else [Scratch(size) for size in buffer]


def huber(args: Any, kwargs: Any, outputs: list[Any]) -> Requests | None:
    """huber_loss: the unreduced loss comes first (Loss.cpp)."""
    if given(args, kwargs, 2, "reduction", _MEAN) == 0:
        return None
    size = torch.broadcast_shapes(args[0].shape, args[1].shape)
    return [Scratch(math.prod(size) * outputs[0].dtype.itemsize), Output(0), *_whole(size)]


def binary_with_logits(args: Any, kwargs: Any, outputs: list[Any]) -> Requests:
    """(1 - target) * input - log_sigmoid(input), then its mean or sum: Loss.cpp, order as recorded with torch 2.4."""
    source, target = args[:2]
    pos_weight = given(args, kwargs, 3, "pos_weight")
    reduction = given(args, kwargs, 4, "reduction", _MEAN)
    size = nbytes(source)
    first = Output(0) if reduction == 0 else Scratch(size)
    scratch = int(reduction != 0)
    if pos_weight is None:
        found: Requests = [first, Scratch(size), Free(scratch)]
    else:
        weight = math.prod(torch.broadcast_shapes(pos_weight.shape, target.shape)) * source.dtype.itemsize
        found = [Scratch(nbytes(pos_weight)), Scratch(weight), Free(0), first, Scratch(size)]
        found += [Free(2 + scratch), Free(1)]
    return found if reduction == 0 else [*found, Output(0), *_whole(source.shape)]


def negative_log_likelihood_2d(args: Any, kwargs: Any, outputs: list[Any]) -> Requests:
    """nll_loss2d_forward: total_weight has its memory before the output is resized (cuda/NLLLoss2d.cu)."""
    return [Output(1), Output(0)]


def binary(args: Any, kwargs: Any) -> Plan:
    """The reduced loss is the unreduced one's memory, resized (binary_cross_entropy_cuda, cuda/Loss.cu)."""
    source = args[0]
    reduction = given(args, kwargs, 3, "reduction", _MEAN)
    size = nbytes(source)
    if reduction == 0:
        return Plan([New(tuple(source.shape), source.stride(), 0, source.dtype, size, False)], None, None, False, None)
    scratch: Requests = [Output(0), Scratch(source.dtype.itemsize), *_whole(source.shape)]
    return Plan([New((), (), 0, source.dtype, size, False)], None, scratch, False, None)
