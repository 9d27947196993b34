"""Workspaces of cuDNN's gradients of weights on Hopper GPUs; hopper_convolutions.py tells where the rules come from.

The gradient of a weight sums over all pixels. Where one sum leaves processors idle, parts of it are kept in float32:
whole weights, or the tiles of a weight that processors share. Winograd's algorithm and Fourier transforms keep
transformed operands instead.
"""

from __future__ import annotations

import math

from memexplore.virtual_gpu.kernels.hopper_shapes import Convolution, Precision

_PROCESSORS = 132
_HALF_PROCESSORS = 120
"""Processors that kernels of 16 bits divide tiles among: those are in groups, which do not fill all of a GPU."""
_SUM = 4
"""Bytes of an element of a partial sum."""
COMPLEX = 8
"""Bytes of a number of a Fourier transform."""


def weight_gradient(convolution: Convolution) -> int:
    """Return the bytes of the workspace of the gradient of a weight, 0 for none.

    >>> shapes = (32, 32, 32, 32), (64, 32, 5, 5), (32, 64, 32, 32)
    >>> weight_gradient(Convolution(*shapes, 1, Precision.TF32, channels_last=False))  # by Fourier transforms
    112197632
    """
    if convolution.precision is Precision.FP32:
        return _fp32(convolution)
    if convolution.is_pointwise:
        return _pointwise(convolution)
    return _half(convolution) if convolution.is_half else _tf32(convolution)


def _fp32(convolution: Convolution) -> int:
    few = convolution.inputs < 64 and convolution.pixels > 45_000
    if convolution.side != 3 or convolution.inputs < 32 or few or convolution.products < 5_000_000:
        return 0
    if convolution.is_square:
        return _winograd(convolution) + (convolution.operands if convolution.channels_last else 0)
    dilated = convolution.dilation > 1 and not convolution.channels_last and convolution.pixels > 200
    return convolution.padded() if dilated else 0


def _pointwise(convolution: Convolution) -> int:
    if convolution.stride > 1:
        split = convolution.pixels > (12_500 if convolution.is_half else 2_300)
        return convolution.for_tensor_cores + (_tile_sums(convolution) if split else 0)
    weight = math.prod(convolution.weight) * _SUM
    if not convolution.channels_last:
        # A product for each image, and then their sum, unless the products are much larger than the images.
        images, pairs = convolution.result[0], convolution.inputs * convolution.outputs
        larger = pairs > 4 * (convolution.inputs + convolution.outputs) * convolution.image and images > 1
        many = convolution.image <= 256 and images >= (32 if convolution.is_half else 128)
        if larger or (many and pairs >= 200_000):
            return convolution.for_tensor_cores + (_tile_sums(convolution) if convolution.pixels > 8_000 else 0)
        return images * weight
    tiles = -(-convolution.outputs // 128) * -(-convolution.inputs // 128)
    if convolution.is_half:
        parts = min(_PROCESSORS // tiles, convolution.pixels // 1380) if convolution.pixels > 5_400 else 0
    else:
        parts = min(2 * _PROCESSORS // tiles, convolution.pixels // 64) if convolution.pixels > 905 else 0
    return parts * weight + 256 if parts > 1 else 0


def _half(convolution: Convolution) -> int:
    converted, pixels = convolution.for_tensor_cores, convolution.pixels
    if convolution.is_aligned(convolution.inputs) and convolution.is_aligned(convolution.outputs):
        if pixels <= 14_336:
            return 0 if convolution.reduction <= 203 else converted
        return converted if convolution.outputs > 350 else converted + _tile_sums(convolution)
    if convolution.largest <= 145_700:
        return 0 if convolution.reduction <= 301 else converted
    if pixels <= 3_400:
        return converted
    if convolution.inputs <= 3 and convolution.products <= 14_400_000:
        if pixels <= 12_500:
            return 0
        if convolution.precision is Precision.BF16 and convolution.is_square and convolution.side in (3, 5):
            return _winograd(convolution)
    if convolution.is_first_layer and pixels > 150_000:
        return convolution.for_first_layer + 8 * 4 * convolution.outputs * convolution.window * _SUM + 600
    return converted + _weight_sums(convolution)


def _tf32(convolution: Convolution) -> int:
    if convolution.channels_last:
        return _tf32_channels_last(convolution)
    converted, pixels, largest = convolution.for_tensor_cores, convolution.pixels, convolution.largest
    if not convolution.is_aligned(convolution.inputs):
        return 0 if _is_direct(convolution) or pixels <= 648 else converted + _weight_sums(convolution)
    if convolution.stride > 1:
        if pixels <= 1_800:
            return 0 if pixels <= 168 else converted
        return converted + _tile_sums(convolution)
    if convolution.side > 3:
        return _tf32_large_window(convolution)
    if largest > 942_000:
        return converted + (_tile_sums(convolution) if convolution.reduction <= 5_150 else 0)
    if largest <= 37_000 or convolution.reduction <= 203:
        return 0
    return _winograd(convolution) if convolution.is_square and convolution.outputs <= 350 else converted


def _tf32_large_window(convolution: Convolution) -> int:
    if convolution.products <= 27_000_000:
        return 0
    # Fourier transforms of whole images, as long as these are not many.
    transforms = convolution.pixels <= 40_000 and convolution.inputs >= 32 and convolution.reduction <= 1_130
    if transforms and convolution.is_square and _transform_side(convolution) <= 128:
        return _fourier(convolution)
    many = convolution.outputs > 64 and convolution.pixels > 16_000
    return convolution.for_tensor_cores + (_tile_sums(convolution) if many else _weight_sums(convolution))


def _tf32_channels_last(convolution: Convolution) -> int:
    pixels, inputs = convolution.pixels, convolution.inputs
    if convolution.is_aligned(inputs) and convolution.is_aligned(convolution.outputs):
        if pixels <= 2_170 or convolution.outputs > 570:
            return 0
        if inputs > 22:
            return _tile_sums(convolution)
        return convolution.padded(weight=False) + _weight_sums(convolution)
    if convolution.is_aligned(inputs) and convolution.side <= 3:
        return convolution.for_tensor_cores + _tile_sums(convolution) if pixels > 15_000 else 0
    if _is_direct(convolution) or convolution.products <= 15_300_000:
        return 0
    return convolution.padded() + _weight_sums(convolution)


def _is_direct(convolution: Convolution) -> bool:
    """Return whether a kernel without tensor cores computes the gradient of a small weight with unaligned channels."""
    read_by_tensor_cores = 4 < convolution.inputs <= 8 and convolution.pixels > 3_000
    return math.prod(convolution.weight) <= 9_300 and not read_by_tensor_cores


def _tiles(convolution: Convolution) -> tuple[int, int]:
    """Return the rows (channels of the result) and columns (of the input, at one pixel of the window) of a tile."""
    outputs, inputs, pixels = convolution.outputs, convolution.inputs, convolution.pixels
    rows, columns = 128 if outputs > 64 else 64, 128 if inputs > 64 else 64
    tiles = -(-outputs // rows) * -(-inputs // columns) * convolution.window
    if rows == columns == 128:
        if _PROCESSORS // 2 < tiles < _PROCESSORS:
            return 128, 64  # one large tile for each processor would leave some of them idle
        if tiles >= _PROCESSORS:
            return rows, columns
    if not convolution.is_half:
        small = rows == columns == 128 and tiles < 36 and pixels < 16_384
        return (128, 64) if small else (rows, columns)
    if pixels <= 16_384:
        return 64, 64
    if pixels <= 65_536:
        return (128, 64) if rows == columns == 128 and tiles < 18 else (rows, columns)
    if outputs >= 200 and inputs > 64:
        return 256, 128
    return rows, 256 if inputs >= 256 else columns


def _tile_sums(convolution: Convolution) -> int:
    """Return the bytes of partial sums of kernels that divide the tiles of a weight evenly among processors."""
    rows, columns = _tiles(convolution)
    tiles = -(-convolution.outputs // rows) * -(-convolution.inputs // columns) * convolution.window
    in_groups = convolution.is_half and rows * columns < 256 * 128
    processors = _HALF_PROCESSORS if in_groups else _PROCESSORS
    parts = processors // tiles * tiles if tiles <= processors else processors
    # A counter for each part; the rest stands for what kernels keep beside them.
    return parts * (rows * columns * _SUM + 4) + 190


def _weight_sums(convolution: Convolution) -> int:
    """Return the bytes of partial sums of kernels that keep the whole weight for each part.

    The number of parts is learned inside cuDNN: the median is near two tiles for each processor.
    """
    elements = 16 // convolution.precision.itemsize
    inputs, outputs = (-(-channels // elements) * elements for channels in (convolution.inputs, convolution.outputs))
    tiles = -(-outputs // 64) * -(-inputs * convolution.window // 64)
    steps = -(-convolution.pixels // (64 if convolution.is_half else 32))
    parts = max(min(2 * _PROCESSORS // tiles, steps // 8), 1)
    return parts * inputs * outputs * convolution.window * _SUM + 128


def _winograd(convolution: Convolution) -> int:
    """Return the bytes of transformed operands: 36 numbers for 4 x 4 pixels, or 169 for 9 x 9 with a 5 x 5 window."""
    pixels, numbers = (4, 36) if convolution.side == 3 else (9, 169)
    images = convolution.result[0] if convolution.side == 3 else -(-convolution.result[0] // 16) * 16
    blocks = images * math.prod(-(-side // pixels) for side in convolution.result[2:])
    channels = convolution.inputs + convolution.outputs
    return numbers * _SUM * (blocks * channels + convolution.inputs * convolution.outputs)


def _transform_side(convolution: Convolution) -> int:
    """Return the side of the smallest Fourier transform, a power of two from 16 on, that holds an image."""
    side = max(convolution.result[2:]) + convolution.side - 1
    return max(1 << (side - 1).bit_length(), 16)


def _fourier(convolution: Convolution) -> int:
    """Return the bytes of a copy of the gradient and of two buffers for Fourier transforms of whole images."""
    side = _transform_side(convolution)
    images = -(-convolution.result[0] // 16) * 16 if side == 16 else convolution.result[0]
    channels, pairs = convolution.inputs + convolution.outputs, convolution.inputs * convolution.outputs
    transforms = max(images * channels, pairs) * side * (side // 2 + 1) * COMPLEX
    return math.prod(convolution.result) * convolution.precision.itemsize + 2 * transforms
