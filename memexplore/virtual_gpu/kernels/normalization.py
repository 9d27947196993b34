"""Memory of normalization kernels: group and RMS norm.

In: the op's arguments. Out: `Requests` or `Plan`, as table.py says. Sources are below aten/src/ATen/native.
"""

from __future__ import annotations

from typing import Any

import torch

from memexplore.virtual_gpu.kernels.plan import Constant, Output, Plan, Requests, Scratch
from memexplore.virtual_gpu.kernels.shapes import accumulator_bytes, argument, nbytes, new, new_outputs


def group_norm(args: Any, kwargs: Any, outputs: list[Any]) -> Requests | None:
    """Two factors for each sample and channel: GroupNormKernelImplInternal in cuda/group_norm_kernel.cu."""
    source, weight, bias, samples, channels, area = args[:6]
    if area == 1 or (weight is None and bias is None):
        return None
    size = samples * channels * accumulator_bytes(source.dtype)
    return [*new_outputs(outputs), Scratch(size), Scratch(size)]


def group_norm_backward(args: Any, kwargs: Any, outputs: list[Any]) -> Requests | None:
    """Sums for each channel, factors for each group: GroupNormBackwardKernelImplInternal, cuda/group_norm_kernel.cu."""
    source, weight = args[1], args[4]
    samples, channels, area, groups = args[5:9]
    mask = argument(args, kwargs, 9, "output_mask", (True, True, True))
    if area == 1:
        return None
    item = accumulator_bytes(source.dtype)
    channel, group = samples * channels * item, samples * groups * item
    requests: Requests = [*new_outputs(outputs), Scratch(channel), Scratch(channel)]
    if mask[0]:
        # The factors of the channels begin empty and get their memory when they are computed, after the others.
        requests += [Scratch(group), Scratch(group)]
        requests += [Scratch(channel)] if weight is not None else []
    return requests


def rms_norm(args: Any, kwargs: Any) -> Plan:
    """A copy of non-contiguous input, result, reciprocal roots: _fused_rms_norm_cuda in cuda/layer_norm_kernel.cu."""
    source, shape = args[:2]
    rows = source.shape[: source.dim() - len(shape)]
    outputs: list[Any] = [new(tuple(source.shape), source.dtype)]
    dtype = torch.float32 if source.dtype in (torch.float16, torch.bfloat16) else source.dtype
    outputs.append(new((*rows, *(1 for _ in shape)), dtype))
    copy: Requests = [] if source.is_contiguous() else [Scratch(nbytes(source))]
    return Plan(outputs, tuple, [*copy, Output(0), Output(1)])


def rms_norm_backward(args: Any, kwargs: Any) -> Plan:
    """Copies of non-contiguous arguments, gradients: _fused_rms_norm_backward_cuda in cuda/layer_norm_kernel.cu."""
    gradient, source, _, _, weight, mask = args
    outputs: list[Any] = [
        new(tuple(source.shape), source.dtype) if mask[0] else Constant(None),
        new(tuple(weight.shape), weight.dtype) if mask[1] and weight is not None else Constant(None),
    ]
    copies: Requests = [Scratch(nbytes(tensor)) for tensor in (gradient, source) if not tensor.is_contiguous()]
    return Plan(outputs, tuple, [*copies, *new_outputs(outputs)])
