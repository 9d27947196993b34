"""Memory of batch normalization: staging buffers of channels_last kernels, workspaces of cuDNN.

In: the op's arguments. Out: `Requests`. Sources are below aten/src/ATen/native.
"""

from __future__ import annotations

from typing import Any

import torch

from memexplore.tape import Category
from memexplore.virtual_gpu.kernels import reductions
from memexplore.virtual_gpu.kernels.plan import Free, NewTensor, Output, Requests, Scratch
from memexplore.virtual_gpu.kernels.shapes import accumulator_bytes, argument, new_outputs

_aten = torch.ops.aten

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


def staging(values: int, channels: int, each: int) -> Requests:
    """Return the buffer and semaphores of a channels_last reduction, none if one block sums each channel.

    `each` is the bytes for each channel and block. Source: flexible_launch_configs in cuda/Normalization.cuh.

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
    return [Scratch(each * channels * blocks), Scratch(4 * -(-channels // width))]


def forward(args: Any, kwargs: Any, outputs: list[Any]) -> Requests | None:
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


def backward(args: Any, kwargs: Any, outputs: list[Any]) -> Requests | None:
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
            requests += [*buffer, *(Free(number + each) for each in reversed(range(len(buffer))))]
    return [*requests, Output(0)] if mask[0] else requests


# --- cuDNN ----------------------------------------------------------------------------------------------------------

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


def cudnn_forward(args: Any, kwargs: Any, outputs: list[Any]) -> Requests | None:
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


def cudnn_backward(args: Any, kwargs: Any, outputs: list[Any]) -> Requests | None:
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


REQUESTS: list[tuple[Any, str, list[Any]]] = [
    (forward, "cuda/Normalization.cu", [_aten.native_batch_norm.default]),
    (backward, "cuda/Normalization.cu", [_aten.native_batch_norm_backward.default]),
    (cudnn_forward, "cudnn/BatchNorm.cpp", [_aten.cudnn_batch_norm.default]),
    (cudnn_backward, "cudnn/BatchNorm.cpp", [_aten.cudnn_batch_norm_backward.default]),
]
"""Rows of kind REQUESTS for the table of kernels."""
