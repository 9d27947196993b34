"""What loss functions request beside their outputs."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch

from memexplore.virtual_gpu import build, reductions, values
from memexplore.virtual_gpu.plans import Free, New, Output, Plan, Scratch
from memexplore.virtual_gpu.shapes import Requests, given, nbytes, new, places

_aten = torch.ops.aten
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
    buffer = reductions.scratch(shape, strides, (), 4, build.current())
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


# --- connectionist temporal classification: cuda/LossCTC.cu ---------------------------------------------------------


def ctc_with_lengths(mode: Any, func: Any, args: Any, kwargs: Any) -> Any:
    """The overloads that take lengths as tensors: read where they are real, else taken to be as long as can be."""
    names = [argument.name for argument in func._schema.arguments]
    first = names.index("input_lengths")
    log_probs, targets = args[names.index("log_probs")], args[names.index("targets")]
    longest = targets.shape[1] if targets.dim() == 2 else targets.shape[0] // log_probs.shape[1]
    lengths = []
    for tensor, most in ((args[first], log_probs.shape[0]), (args[first + 1], longest)):
        if getattr(tensor, "host", None) is None:
            lengths.append(tensor.tolist())
        else:
            values.assume("the lengths in ctc_loss count as the longest possible")
            lengths.append([most] * tensor.numel())
    with mode:
        op = _aten._ctc_loss.default if first == 2 else _aten._ctc_loss_backward.default
        return op(*args[:first], *lengths, *args[first + 2 :], **kwargs)


def ctc(args: Any, kwargs: Any) -> Plan:
    """ctc_loss_gpu_template: offsets and lengths on the device, the log-alphas, the losses."""
    log_probs, _, _, target_lengths = args[:4]
    steps, batch = log_probs.shape[:2]
    outputs: list[Any] = [
        new((batch,), log_probs.dtype),
        new((batch, steps, 2 * max(target_lengths, default=0) + 1), log_probs.dtype),
    ]
    return Plan(outputs, tuple, [*(Scratch(8 * batch) for _ in range(3)), Output(1), Output(0)], False, None)


def ctc_backward(args: Any, kwargs: Any) -> Plan:
    """ctc_loss_backward_gpu_template: log-betas of the log-alphas' size, then the gradient."""
    log_probs, log_alpha = args[1], args[6]
    lengths: Requests = [Scratch(8 * log_probs.shape[1]) for _ in range(3)]
    outputs: list[Any] = [new(tuple(log_probs.shape), log_probs.dtype)]
    return Plan(outputs, None, [Scratch(nbytes(log_alpha)), Output(0), *lengths], False, None)
