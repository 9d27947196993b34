"""Request the memory of batch, group and RMS normalization: sums, staging buffers, and workspaces of cuDNN.

Sources are below aten/src/ATen/native.
"""

from __future__ import annotations

from typing import Any

import torch

from memexplore.tape import Category
from memexplore.virtual_gpu.kernels import cuda_build, reductions
from memexplore.virtual_gpu.kernels.composite_dispatch import decomposed
from memexplore.virtual_gpu.kernels.plan import (
    Constant,
    Free,
    NewTensor,
    Output,
    Plan,
    Requests,
    Scratch,
    accumulator_bytes,
    argument,
    nbytes,
    new,
    new_outputs,
)
from memexplore.virtual_gpu.kernels.table import Kind, rule

_aten = torch.ops.aten

# --- batch normalization: cuda/Normalization.cu ---------------------------------------------------------------------

_MAX_BLOCK, _TILE, _PER_THREAD, _MAX_GRID = 512, 32, 16, 128
"""MAX_BLOCK_SIZE, OPTIMAL_TILE_W, ELEMENTS_PER_THREAD and MAX_H_BLOCK in cuda/Normalization.cuh."""

_32_BIT = 2**31 - 1


def _is_channels_last(tensor: torch.Tensor) -> bool:
    """Return whether the channels_last kernels run: batch_norm_use_channels_last_kernels in cuda/Normalization.cu."""
    if tensor.dim() == 4 and tensor.is_contiguous(memory_format=torch.channels_last):
        return True
    return tensor.is_contiguous() and tensor.stride()[1] == 1


def _last_power_of_two(value: int) -> int:
    return 1 << (value.bit_length() - 1) if value > 0 else 1


def staging(values: int, channels: int, block_bytes: int) -> Requests:
    """Return the buffer and semaphores of a channels_last reduction, none if one block sums each channel.

    `block_bytes` are those for each channel and block. Source: flexible_launch_configs in cuda/Normalization.cuh.

    >>> [request[0] for request in staging(2 * 64 * 64, 320, 16)]
    [163840, 40]
    """
    width = min(_last_power_of_two(channels), _TILE)
    height = min(_last_power_of_two(-(-values // _PER_THREAD)), _MAX_BLOCK // width)
    if width * height != _MAX_BLOCK:
        width = min(_last_power_of_two(channels), _MAX_BLOCK // height)
    blocks = min(-(-values // (height * _PER_THREAD)), _MAX_GRID)
    if blocks < 8:
        return []
    return [Scratch(block_bytes * channels * blocks), Scratch(4 * -(-channels // width))]


@rule(Kind.REQUESTS, "cuda/Normalization.cu", _aten.native_batch_norm.default)
def native_batch_norm(args: Any, kwargs: Any, outputs: list[Any]) -> Requests | None:
    """native_batch_norm in training: mean and variance of each channel (batch_norm_mean_var in cuda/Normalization.cu).

    Contiguous input needs no buffer, channels_last a mean, a distance and a count for each channel and block; other
    input is reduced as by `var_mean`.
    """
    source = args[0]
    if not argument(args, kwargs, 5, "training"):
        return None
    if source.numel() <= _32_BIT:
        if _is_channels_last(source):
            channels = source.shape[1]
            size = 4 * accumulator_bytes(source.dtype)
            return reductions.after_outputs(outputs, staging(source.numel() // channels, channels, size))
        if source.is_contiguous():
            return None
    reduced = [dim for dim in range(source.dim()) if dim != 1]
    return reductions.after_outputs(outputs, reductions.requests(source, reduced, 16))


@rule(Kind.REQUESTS, "cuda/Normalization.cu", _aten.native_batch_norm_backward.default)
def native_batch_norm_backward(args: Any, kwargs: Any, outputs: list[Any]) -> Requests | None:
    """native_batch_norm_backward: one kernel, or sums for each channel and then the gradient of the input.

    Source: batch_norm_backward_cuda in cuda/Normalization.cu. cuDNN's evaluation mode saves no statistics.
    """
    gradient, source, weight, mean = args[:4]
    saved_mean, saved_deviation, training = args[5:8]
    mask = argument(args, kwargs, 9, "output_mask")
    reduces = training or mask[1] or mask[2]
    last = _is_channels_last(source)
    if reduces and mask[0] and not last and max(source.numel(), gradient.numel()) <= _32_BIT:
        return None
    channels = source.shape[1]
    item = accumulator_bytes(source.dtype)
    requests: Requests = []
    if saved_mean.numel() == 0 and reduces and mean.dtype.itemsize != item:
        requests.append(Scratch(channels * item))
    if saved_deviation.numel() == 0:
        requests.append(Scratch(channels * item))
    if reduces:
        kernel_of_channels_last = last and _is_channels_last(gradient)
        if kernel_of_channels_last or mask[0]:
            requests += [Scratch(channels * item), Scratch(channels * item)]
        for number in (1, 2):
            if type(outputs[number]) is NewTensor:
                requests.append(Output(number))
            elif kernel_of_channels_last and weight is not None:
                requests.append(Scratch(channels * weight.dtype.itemsize))
        if kernel_of_channels_last:
            buffer = staging(source.numel() // channels, channels, 2 * item)
            number = sum(type(entry) is Scratch for entry in requests)
            requests += [*buffer, *(Free(number + position) for position in reversed(range(len(buffer))))]
    return [*requests, Output(0)] if mask[0] else requests


# --- batch normalization in cuDNN: cudnn/BatchNorm.cpp --------------------------------------------------------------

_CHANNELS = 64
"""Channels of a block of cuDNN's persistent kernels."""

_COUNTERS = 1056
"""Bytes that each of its workspaces has besides those for blocks."""


def _in_blocks(tensor: torch.Tensor, rows: int) -> tuple[int, int]:
    """Return the blocks of cuDNN's persistent kernel beside each other (channels) and below each other (values)."""
    channels = tensor.shape[1]
    return -(-channels // _CHANNELS), -(-(tensor.numel() // channels) // rows)


def _is_persistent(tensor: torch.Tensor) -> bool:
    """Return whether cuDNN runs in SPATIAL_PERSISTENT mode: getCudnnBatchNormMode in cudnn/BatchNorm.cpp."""
    return tensor.dim() == 4 and tensor.is_contiguous(memory_format=torch.channels_last) and not tensor.is_contiguous()


@rule(Kind.REQUESTS, "cudnn/BatchNorm.cpp", _aten.cudnn_batch_norm.default)
def cudnn_batch_norm(args: Any, kwargs: Any, outputs: list[Any]) -> Requests | None:
    """cudnn_batch_norm in training: a workspace for channels_last, none otherwise (cudnn/BatchNorm.cpp).

    Two floats for each channel and block, a counter for each block and column. A block has 64 values in float32, 160
    in float16. Derived from ten workspaces of cuDNN 9.19 on an H100, which it gives to the byte.
    """
    source = args[0]
    if not argument(args, kwargs, 5, "training") or not _is_persistent(source):
        return None
    across, down = _in_blocks(source, 160 if source.dtype is torch.float16 else 64)
    size = _COUNTERS + 16 + 4 * across * (down + 1) + 8 * _CHANNELS * across * down
    return [*new_outputs(outputs), Scratch(size, Category.WORKSPACE)]


@rule(Kind.REQUESTS, "cudnn/BatchNorm.cpp", _aten.cudnn_batch_norm_backward.default)
def cudnn_batch_norm_backward(args: Any, kwargs: Any, outputs: list[Any]) -> Requests | None:
    """cudnn_batch_norm_backward: a workspace for channels_last, none otherwise (cudnn/BatchNorm.cpp).

    Two floats for each channel and block of 96 values, a counter for each column. Derived from ten workspaces of cuDNN
    9.19 on an H100, which it gives to the byte.
    """
    source = args[0]
    if not _is_persistent(source):
        return None
    across, down = _in_blocks(source, 96)
    size = _COUNTERS + 4 * across + 8 * _CHANNELS * across * down
    return [*new_outputs(outputs), Scratch(size, Category.WORKSPACE)]


@rule(Kind.COMPOSITE, "Normalization.cpp", _aten._batch_norm_impl_index.default)
def batch_norm(
    tensor: torch.Tensor,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    mean: torch.Tensor | None,
    variance: torch.Tensor | None,
    training: bool,
    momentum: float,
    eps: float,
    cudnn: bool,
) -> Any:
    """cuDNN's kernel where its conditions hold: _select_batch_norm_backend in Normalization.cpp."""
    if not tensor.numel():
        return decomposed(
            _aten._batch_norm_impl_index.default,
            *(tensor, weight, bias, mean, variance, training, momentum, eps, cudnn),
        )
    if cudnn and _uses_cudnn_batch_norm(tensor, weight, bias, mean, variance, training, eps):
        assert weight is not None
        tensor = tensor.contiguous(memory_format=_suggested_format(tensor))
        results = _aten.cudnn_batch_norm.default(tensor, weight, bias, mean, variance, training, momentum, eps)
        return (*results, 1)
    reserve = torch.empty(0, dtype=torch.uint8, device=tensor.device)
    results = _aten.native_batch_norm.default(tensor, weight, bias, mean, variance, training, momentum, eps)
    return (*results, reserve, 0)


def _uses_cudnn_batch_norm(
    tensor: torch.Tensor,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    mean: torch.Tensor | None,
    variance: torch.Tensor | None,
    training: bool,
    eps: float,
) -> bool:
    if weight is None or bias is None or not torch.backends.cudnn.enabled or eps < 1e-5:
        return False
    if (mean is None) != (variance is None) or (mean is None and not training):
        return False
    if tensor.dtype is torch.bfloat16 or weight.dtype is torch.bfloat16 or tensor.numel() >= 2**31 - 1:
        return False
    if tensor.dtype is torch.float16 and weight.dtype is not torch.float32:
        return False
    return tensor.dim() > 2 and tensor.shape[0] <= (880_801 if training else 65_535)


def _suggested_format(tensor: torch.Tensor) -> torch.memory_format:
    """Return channels_last where the strides are in that format: suggest_memory_format in c10."""
    formats = {4: torch.channels_last, 5: torch.channels_last_3d}
    channels_last = formats.get(tensor.dim())
    if channels_last and tensor.is_contiguous(memory_format=channels_last) and not tensor.is_contiguous():
        return channels_last
    return torch.contiguous_format


# --- group and RMS normalization ------------------------------------------------------------------------------------


@rule(Kind.REQUESTS, "cuda/group_norm_kernel.cu", _aten.native_group_norm.default)
def group_norm(args: Any, kwargs: Any, outputs: list[Any]) -> Requests | None:
    """Two factors for each sample and channel: GroupNormKernelImplInternal in cuda/group_norm_kernel.cu."""
    source, weight, bias, samples, channels, area = args[:6]
    if area == 1 or (weight is None and bias is None):
        return None
    size = samples * channels * accumulator_bytes(source.dtype)
    return [*new_outputs(outputs), Scratch(size), Scratch(size)]


@rule(Kind.REQUESTS, "cuda/group_norm_kernel.cu", _aten.native_group_norm_backward.default)
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


@rule(Kind.COMPOSITE, "layer_norm.cpp", _aten.rms_norm.default)
def rms_norm(
    tensor: torch.Tensor, shape: list[int], weight: torch.Tensor | None = None, eps: float | None = None
) -> torch.Tensor:
    """No fused kernel until torch 2.8: layer_norm.cpp."""
    if cuda_build.current().release >= (2, 9):
        return decomposed(_aten.rms_norm.default, tensor, shape, weight, eps)
    return decomposed(_aten._fused_rms_norm.default, tensor, shape, weight, eps)[0]


@rule(Kind.PLAN, "cuda/layer_norm_kernel.cu", _aten._fused_rms_norm.default)
def fused_rms_norm(args: Any, kwargs: Any) -> Plan:
    """A copy of non-contiguous input, result, reciprocal roots: _fused_rms_norm_cuda in cuda/layer_norm_kernel.cu."""
    source, shape = args[:2]
    rows = source.shape[: source.dim() - len(shape)]
    outputs: list[Any] = [new(tuple(source.shape), source.dtype)]
    dtype = torch.float32 if source.dtype in (torch.float16, torch.bfloat16) else source.dtype
    outputs.append(new((*rows, *(1 for _ in shape)), dtype))
    copy: Requests = [] if source.is_contiguous() else [Scratch(nbytes(source))]
    return Plan(outputs, tuple, [*copy, Output(0), Output(1)])


@rule(Kind.PLAN, "cuda/layer_norm_kernel.cu", _aten._fused_rms_norm_backward.default)
def fused_rms_norm_backward(args: Any, kwargs: Any) -> Plan:
    """Copies of non-contiguous arguments, gradients: _fused_rms_norm_backward_cuda in cuda/layer_norm_kernel.cu."""
    gradient, source, _, _, weight, mask = args
    outputs: list[Any] = [
        new(tuple(source.shape), source.dtype) if mask[0] else Constant(None),
        new(tuple(weight.shape), weight.dtype) if mask[1] and weight is not None else Constant(None),
    ]
    copies: Requests = [Scratch(nbytes(tensor)) for tensor in (gradient, source) if not tensor.is_contiguous()]
    return Plan(outputs, tuple, [*copies, *new_outputs(outputs)])


@rule(Kind.REQUESTS, "Normalization.cpp", _aten.renorm.default)
def renorm(args: Any, kwargs: Any, outputs: list[Any]) -> Requests:
    """The norm of each slice, after the result: renorm_out in Normalization.cpp; of half precision in float32."""
    source, dim = args[0], args[2]
    slices = source.shape[dim]
    item = accumulator_bytes(source.dtype)
    further: Requests = [Scratch(slices * item)]
    if item != source.dtype.itemsize:
        further.append(Scratch(slices * source.dtype.itemsize))
    return [*new_outputs(outputs), *further]
