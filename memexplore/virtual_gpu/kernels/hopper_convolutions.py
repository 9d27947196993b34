"""Workspaces of cuDNN's convolutions on Hopper GPUs: shapes go in, bytes come out.

cuDNN's heuristics are not public. The rules follow 32 600 convolutions that were measured with torch 2.11 and cuDNN
9.19 on an H100 (67 shapes of layers, 1 to 256 images, 5 to 256 pixels a side), with the names and grids of their
kernels. These tell what a workspace holds: operands that are converted for tensor cores, or transformed operands. In 16
bits cuDNN mostly chooses the same kernel for both memory formats, and converts where it must.

Which kernel runs is learned inside cuDNN: the thresholds are where the measured choices change. The rules hold as well
in 9 200 convolutions that were measured before, without names: one, two, and three dimensions, other shapes.
"""

from __future__ import annotations

import math

from memexplore.virtual_gpu.kernels.hopper_shapes import Convolution, Pass, Precision, precision_of
from memexplore.virtual_gpu.kernels.hopper_weight_gradients import COMPLEX, weight_gradient

__all__ = ["Convolution", "Pass", "Precision", "precision_of", "workspace"]


def workspace(convolution: Convolution, of: Pass) -> int:
    """Return the bytes of the workspace, 0 for none.

    >>> shapes = (8, 64, 56, 56), (64, 64, 3, 3), (8, 64, 56, 56)
    >>> workspace(Convolution(*shapes, 1, Precision.TF32, channels_last=False), Pass.RESULT)  # all three, converted
    12992528
    >>> workspace(Convolution(*shapes, 1, Precision.TF32, channels_last=True), Pass.RESULT)
    0
    """
    if not convolution.products:
        return 0
    if of is Pass.WEIGHT_GRADIENT:
        return weight_gradient(convolution)
    if convolution.precision is Precision.FP32:
        return convolution.padded() if convolution.channels_last else 0
    if convolution.is_pointwise:
        return _pointwise_result(convolution) if of is Pass.RESULT else _pointwise_input_gradient(convolution)
    if convolution.is_half:
        return _half_result(convolution) if of is Pass.RESULT else _half_input_gradient(convolution)
    return _tf32_result(convolution) if of is Pass.RESULT else _tf32_input_gradient(convolution)


def _pointwise_result(convolution: Convolution) -> int:
    """A window of one pixel is a matrix product in memory, unless it skips pixels: then operands are converted."""
    small = convolution.is_half and convolution.image <= 49 and convolution.products > 182_000_000
    return convolution.for_tensor_cores if (convolution.stride > 1 or small) and not convolution.channels_last else 0


def _pointwise_input_gradient(convolution: Convolution) -> int:
    """As of the result, except that more of the small images are converted."""
    pairs = convolution.inputs * convolution.outputs
    if convolution.is_half:
        small = convolution.image <= 64 and pairs >= 200_000
    else:
        small = 500 < convolution.pixels < 45_000 and pairs >= 1_000_000
    return convolution.for_tensor_cores if (convolution.stride > 1 or small) and not convolution.channels_last else 0


def _half_result(convolution: Convolution) -> int:
    reduction, is_fp16 = convolution.reduction, convolution.precision is Precision.FP16
    image = convolution.inputs <= 4 and convolution.outputs > 40
    if image and not convolution.channels_last:
        if convolution.pixels <= 30_000 or reduction <= 27 or (convolution.is_patchwise and reduction <= 104):
            return 0
        if convolution.is_first_layer:
            return convolution.for_first_layer
    elif reduction <= 104:
        # Channels last that are not aligned are read as they are: any number for float16, few or large windows else.
        pads = image and not is_fp16 and convolution.inputs > 1 and not convolution.is_patchwise
        return convolution.for_tensor_cores if pads else 0
    if is_fp16 and min(convolution.inputs, convolution.outputs) <= 12 and reduction <= 665:
        return 0 if convolution.channels_last else convolution.operands
    return convolution.for_tensor_cores


def _tf32_result(convolution: Convolution) -> int:
    inputs, outputs, side = convolution.inputs, convolution.outputs, convolution.side
    if convolution.channels_last:
        if convolution.is_aligned(inputs):
            few = outputs < 5 and side <= 5
            return 0 if few or convolution.is_aligned(outputs) else convolution.padded()
        if convolution.products <= 40_000_000 or (side <= 5 and outputs <= 45):
            return 0
        return convolution.operands - math.prod(convolution.result) * convolution.precision.itemsize
    if convolution.reduction <= 268:
        if inputs > 8 and outputs <= 16 and convolution.pixels > 25_000:
            return convolution.for_tensor_cores
        return convolution.operands if side > 5 and convolution.stride > 1 and convolution.result[0] > 2 else 0
    small = convolution.products <= 477_000_000
    if small and (side > 9 or (inputs <= 40 and convolution.pixels <= 10_000)):
        return 0
    # A kernel writes channels first: its result needs no conversion.
    writes = side <= 4 and outputs > 3 and (small or inputs <= 64 < outputs)
    return convolution.padded(result=False) if writes else convolution.for_tensor_cores


def _half_input_gradient(convolution: Convolution) -> int:
    if convolution.stride > 2:
        patchwise = convolution.is_patchwise and convolution.pixels <= 2_300
        return convolution.operands if patchwise or convolution.channels_last else 0
    if convolution.channels_last and convolution.reduction <= 26:
        return convolution.padded()
    return convolution.for_tensor_cores


def _tf32_input_gradient(convolution: Convolution) -> int:
    inputs, outputs = convolution.inputs, convolution.outputs
    if (
        convolution.is_square
        and convolution.side == 5
        and inputs > 10
        and outputs <= 64
        and convolution.pixels > 140_000
    ):
        return _fourier_in_blocks(convolution) + (convolution.operands if convolution.channels_last else 0)
    if not convolution.channels_last:
        large = min(convolution.result[2:]) > 50 and outputs <= 25 and inputs * outputs > 6
        if large or (convolution.is_patchwise and inputs > 3):
            return convolution.for_tensor_cores
        return 0 if convolution.products <= 128_000_000 or inputs <= 4 else convolution.for_tensor_cores
    if convolution.is_aligned(inputs):
        return convolution.for_tensor_cores
    if inputs == 1:
        return 0
    if convolution.reduction <= 36:
        return convolution.for_tensor_cores if outputs > 22 else convolution.padded()
    if outputs <= 35:
        return convolution.padded()
    if convolution.products > 16_400_000:
        return convolution.operands  # by a kernel that reads and writes channels first
    return convolution.padded() if convolution.stride > 2 else convolution.for_tensor_cores


def _fourier_in_blocks(convolution: Convolution) -> int:
    """Return the bytes of Fourier transforms of the weight, and of one block of 32 x 32 pixels of each channel."""
    channels, pairs = convolution.inputs + convolution.outputs, convolution.inputs * convolution.outputs
    return (pairs + 2 * convolution.result[0] * channels) * 32 * (32 // 2 + 1) * COMPLEX
