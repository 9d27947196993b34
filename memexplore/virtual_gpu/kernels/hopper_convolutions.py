"""Workspaces of cuDNN's convolutions on Hopper GPUs: shapes go in, bytes come out.

cuDNN's heuristics are not public. The rules follow 47 000 convolutions that were measured with torch 2.11 and cuDNN
9.19 on an H100 (67 shapes of layers, 1 to 256 images, 5 to 256 pixels a side), 32 600 of them with the names and grids
of their kernels. The names tell what a workspace holds:

- Kernels of tensor cores read and write channels last, with channels padded to 16 bytes. Other operands are converted
  inside the workspace. In 16 bits cuDNN chooses the same kernel for both memory formats.
- The gradient of a weight sums over all pixels. Where one sum leaves processors idle, parts of it are kept in float32.
- Winograd's algorithm and Fourier transforms keep transformed operands, in float32.

Which kernel runs, and in how many parts it sums, is learned inside cuDNN: the thresholds below are where the measured
choices change. They were fitted to three quarters of the measurements, and hold as well in the last quarter.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Sequence
from typing import NamedTuple

import torch

_CONVERTED = 16
"""Bytes of a workspace beside the converted operands."""
_PROCESSORS = 132
_HALF_PROCESSORS = 120
"""Processors that kernels of 16 bits divide tiles among: those are in groups, which do not fill all of a GPU."""
_SUM = 4
"""Bytes of an element of a partial sum."""
_COMPLEX = 8


class Pass(enum.Enum):
    """What a convolution computes."""

    RESULT = "the result"
    INPUT_GRADIENT = "the gradient of the input"
    WEIGHT_GRADIENT = "the gradient of the weight"


class Precision(enum.Enum):
    """How a convolution multiplies."""

    FP32 = "float32"
    TF32 = "tensor cores, float32"
    FP16 = "tensor cores, float16"
    BF16 = "tensor cores, bfloat16"

    @property
    def itemsize(self) -> int:
        """Bytes of an element."""
        return 2 if self in (Precision.FP16, Precision.BF16) else 4


class Convolution(NamedTuple):
    """A convolution without groups, by the shapes of its operands."""

    source: Sequence[int]
    weight: Sequence[int]
    result: Sequence[int]
    stride: int
    precision: Precision
    channels_last: bool

    @property
    def inputs(self) -> int:
        """Number of channels of the input."""
        return self.weight[1]

    @property
    def outputs(self) -> int:
        """Number of channels of the result."""
        return self.weight[0]

    @property
    def window(self) -> int:
        """Number of pixels of the window."""
        return math.prod(self.weight[2:])

    @property
    def side(self) -> int:
        """Longest side of the window."""
        return max(self.weight[2:])

    @property
    def reduction(self) -> int:
        """Number of products that are summed for an element of the result."""
        return self.inputs * self.window

    @property
    def pixels(self) -> int:
        """Number of results of one channel."""
        return self.result[0] * math.prod(self.result[2:])

    @property
    def products(self) -> int:
        """Number of multiplications."""
        return self.pixels * self.outputs * self.reduction

    @property
    def largest(self) -> int:
        """Number of elements of the input or of the result, whichever has more."""
        return max(math.prod(self.source), math.prod(self.result))

    @property
    def is_half(self) -> bool:
        """Whether elements have 16 bits."""
        return self.precision.itemsize == 2

    @property
    def is_pointwise(self) -> bool:
        """Whether the window is one pixel."""
        return self.window == 1

    def is_aligned(self, channels: int) -> bool:
        """Return whether a number of channels fills a multiple of 16 bytes."""
        return channels * self.precision.itemsize % 16 == 0

    @property
    def operands(self) -> int:
        """Bytes of all three operands, converted without padding."""
        shapes = (self.source, self.weight, self.result)
        return sum(map(math.prod, shapes)) * self.precision.itemsize + _CONVERTED

    def padded(self, source: bool = True, weight: bool = True, result: bool = True) -> int:
        """Return the bytes of the chosen operands with their channels padded to 16 bytes; 0 if none is chosen."""
        elements = 16 // self.precision.itemsize
        inputs, outputs = (-(-channels // elements) * elements for channels in (self.inputs, self.outputs))
        counts = (
            source * inputs * self.source[0] * math.prod(self.source[2:]),
            weight * inputs * outputs * self.window,
            result * outputs * self.pixels,
        )
        return sum(counts) * self.precision.itemsize + _CONVERTED if any(counts) else 0

    @property
    def for_tensor_cores(self) -> int:
        """Bytes of the operands that are converted for tensor cores: those that are not aligned and channels last."""
        if not self.channels_last:
            return self.padded(weight=not self.is_pointwise)
        inputs, outputs = not self.is_aligned(self.inputs), not self.is_aligned(self.outputs)
        return self.padded(source=inputs, weight=inputs or outputs, result=outputs)


def workspace(convolution: Convolution, of: Pass) -> int:
    """Return the bytes of the workspace, 0 for none.

    >>> shapes = (8, 64, 56, 56), (64, 64, 3, 3), (8, 64, 56, 56)
    >>> workspace(Convolution(*shapes, 1, Precision.TF32, channels_last=False), Pass.RESULT)  # all three, converted
    12992528
    >>> workspace(Convolution(*shapes, 1, Precision.TF32, channels_last=True), Pass.RESULT)
    0
    """
    if convolution.precision is Precision.FP32:
        converts = convolution.channels_last and of is not Pass.WEIGHT_GRADIENT
        return convolution.padded() if converts else 0
    if convolution.is_pointwise:
        return _POINTWISE[of](convolution)
    if convolution.is_half:
        return _HALF[of](convolution)
    return _TF32[of](convolution)


def _pointwise(convolution: Convolution) -> int:
    """A window of one pixel is a matrix product in memory, unless it skips pixels: then operands are converted."""
    return 0 if convolution.stride == 1 or convolution.channels_last else convolution.for_tensor_cores


def _half_result(convolution: Convolution) -> int:
    many = convolution.outputs > 40
    if convolution.reduction <= 104 or (convolution.reduction <= 272 and many and not convolution.channels_last):
        if convolution.outputs > 288 and convolution.pixels > 22_000:
            return convolution.for_tensor_cores
        # Kernels that read channels last as they are: for float16 any number of them, for bfloat16 one or few results.
        reads = convolution.precision is Precision.FP16 or not many or convolution.inputs == 1
        return 0 if reads or not convolution.channels_last else convolution.for_tensor_cores
    # A kernel for float16 alone reads channels that are not aligned.
    few = min(convolution.inputs, convolution.outputs) <= 12 and convolution.reduction <= 665
    if few and convolution.precision is Precision.FP16:
        return 0 if convolution.channels_last else convolution.operands
    return convolution.for_tensor_cores


def _tf32_result(convolution: Convolution) -> int:
    if not convolution.channels_last:
        if convolution.reduction <= 268:
            if convolution.outputs <= 16 and convolution.reduction > 104 and convolution.pixels > 25_000:
                return convolution.for_tensor_cores
            return convolution.operands if convolution.side > 5 and convolution.stride > 1 else 0
        small = convolution.products <= 477_000_000
        if small and (convolution.side > 9 or (convolution.inputs <= 40 and convolution.pixels <= 10_000)):
            return 0
        if convolution.side <= 4 and convolution.outputs > 3 and (small or convolution.inputs <= 64 < convolution.outputs):
            return convolution.padded(result=False)  # a kernel that writes channels first
        return convolution.for_tensor_cores
    if convolution.is_aligned(convolution.inputs):
        few = convolution.outputs < 5 and convolution.side <= 5
        return 0 if few or convolution.is_aligned(convolution.outputs) else convolution.padded()
    if convolution.products <= 40_000_000 or (convolution.side <= 5 and convolution.outputs <= 45):
        return 0
    return convolution.operands - math.prod(convolution.result) * convolution.precision.itemsize


def _half_input_gradient(convolution: Convolution) -> int:
    if convolution.stride > 2:
        patchwise = set(convolution.weight[2:]) == {convolution.stride} and convolution.pixels <= 2_300
        return convolution.operands if patchwise or convolution.channels_last else 0
    if convolution.channels_last and convolution.reduction <= 26:
        return convolution.padded()
    return convolution.for_tensor_cores


def _tf32_input_gradient(convolution: Convolution) -> int:
    if _is_square(convolution, 5) and convolution.inputs > 10 and convolution.pixels > 140_000:
        return _fourier_in_blocks(convolution) + (convolution.operands if convolution.channels_last else 0)
    if not convolution.channels_last:
        if set(convolution.weight[2:]) == {convolution.stride} and convolution.inputs > 3:
            return convolution.for_tensor_cores
        direct = convolution.products <= 128_000_000 or convolution.inputs <= 4
        return 0 if direct else convolution.for_tensor_cores
    if convolution.is_aligned(convolution.inputs):
        return convolution.for_tensor_cores
    if convolution.inputs == 1:
        return 0
    if convolution.reduction <= 36:
        return convolution.for_tensor_cores if convolution.outputs > 22 else convolution.padded()
    if convolution.outputs <= 35:
        return convolution.padded()
    if convolution.products > 16_400_000:
        return convolution.operands  # by a kernel that reads and writes channels first
    return convolution.padded() if convolution.stride > 2 else convolution.for_tensor_cores


def _pointwise_weight_gradient(convolution: Convolution) -> int:
    if convolution.stride > 1:
        split = convolution.pixels > (12_500 if convolution.is_half else 2_300)
        return convolution.for_tensor_cores + (_tile_sums(convolution) if split else 0)
    weight = math.prod(convolution.weight) * _SUM
    if not convolution.channels_last:
        # A product for each image, and then their sum, unless the products are much larger than the images.
        channels, image = convolution.inputs + convolution.outputs, math.prod(convolution.result[2:])
        if convolution.inputs * convolution.outputs > 4 * channels * image and convolution.result[0] > 1:
            return convolution.for_tensor_cores + (_tile_sums(convolution) if convolution.pixels > 6_000 else 0)
        return convolution.result[0] * weight
    tiles = -(-convolution.outputs // 128) * -(-convolution.inputs // 128)
    if convolution.is_half:
        parts = min(_PROCESSORS // tiles, convolution.pixels // 1380) if convolution.pixels > 5_400 else 0
    else:
        parts = min(2 * _PROCESSORS // tiles, convolution.pixels // 64) if convolution.pixels > 905 else 0
    return parts * weight + 256 if parts > 1 else 0


def _half_weight_gradient(convolution: Convolution) -> int:
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
        if convolution.precision is Precision.BF16 and _is_square(convolution, 3, 5):
            return _winograd(convolution)
    return converted + _weight_sums(convolution)


def _tf32_weight_gradient(convolution: Convolution) -> int:
    aligned = convolution.is_aligned(convolution.inputs)
    if convolution.channels_last:
        return _tf32_weight_gradient_channels_last(convolution)
    converted, pixels = convolution.for_tensor_cores, convolution.pixels
    if not aligned:
        direct = math.prod(convolution.weight) <= 9_300 or pixels <= 648
        return 0 if direct else converted + _weight_sums(convolution)
    if convolution.stride > 1:
        if pixels <= 1_800:
            return 0 if pixels <= 168 else converted
        return converted + _tile_sums(convolution)
    if convolution.side > 3:
        if convolution.products <= 27_000_000:
            return 0
        if convolution.largest <= 1_100_000 and convolution.reduction <= 1_130 and len(convolution.weight) == 4:
            return _fourier(convolution)
        many = convolution.outputs > 64 and pixels > 16_000
        return converted + (_tile_sums(convolution) if many else _weight_sums(convolution))
    if convolution.largest > 942_000:
        return converted + (_tile_sums(convolution) if convolution.reduction <= 5_150 else 0)
    if convolution.outputs > 350:
        return converted if convolution.largest > 37_000 else 0
    wino = convolution.largest > 37_000 and convolution.reduction > 203 and _is_square(convolution, 3)
    return _winograd(convolution) if wino else 0


def _tf32_weight_gradient_channels_last(convolution: Convolution) -> int:
    pixels, inputs = convolution.pixels, convolution.inputs
    if convolution.is_aligned(inputs) and convolution.is_aligned(convolution.outputs):
        if pixels <= 2_170 or convolution.outputs > 570:
            return 0
        if inputs > 22:
            return _tile_sums(convolution)
        return convolution.padded(weight=False) + _weight_sums(convolution)
    if math.prod(convolution.weight) <= 9_300 or convolution.products <= 15_300_000:
        return 0
    return convolution.padded() + _weight_sums(convolution)


def _is_square(convolution: Convolution, *sides: int) -> bool:
    square = len(convolution.weight) == 4 and len(set(convolution.weight[2:])) == 1
    return square and convolution.stride == 1 and convolution.side in sides


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
    parts = max(min(2 * _PROCESSORS // tiles, steps // 5), 1)
    return parts * inputs * outputs * convolution.window * _SUM + 128


def _winograd(convolution: Convolution) -> int:
    """Return the bytes of transformed operands: 36 numbers for 4 x 4 pixels, or 169 for 9 x 9 with a 5 x 5 window."""
    pixels, numbers = (4, 36) if convolution.side == 3 else (9, 169)
    images = convolution.result[0] if convolution.side == 3 else -(-convolution.result[0] // 16) * 16
    blocks = images * math.prod(-(-side // pixels) for side in convolution.result[2:])
    channels = convolution.inputs + convolution.outputs
    return numbers * _SUM * (blocks * channels + convolution.inputs * convolution.outputs)


def _fourier(convolution: Convolution) -> int:
    """Return the bytes of a copy of the gradient and of two buffers for Fourier transforms of whole images."""
    side = max(result + convolution.side - 1 for result in convolution.result[2:])
    size = max(1 << (side - 1).bit_length(), 16)
    images = -(-convolution.result[0] // 16) * 16 if size == 16 else convolution.result[0]
    channels, pairs = convolution.inputs + convolution.outputs, convolution.inputs * convolution.outputs
    transforms = max(images * channels, pairs) * size * (size // 2 + 1) * _COMPLEX
    return math.prod(convolution.result) * convolution.precision.itemsize + 2 * transforms


def _fourier_in_blocks(convolution: Convolution) -> int:
    """Return the bytes of Fourier transforms of the weight, and of one block of 32 x 32 pixels of each channel."""
    channels, pairs = convolution.inputs + convolution.outputs, convolution.inputs * convolution.outputs
    return (pairs + 2 * convolution.result[0] * channels) * 32 * (32 // 2 + 1) * _COMPLEX


_POINTWISE = {
    Pass.RESULT: _pointwise,
    Pass.INPUT_GRADIENT: _pointwise,
    Pass.WEIGHT_GRADIENT: _pointwise_weight_gradient,
}
_HALF = {
    Pass.RESULT: _half_result,
    Pass.INPUT_GRADIENT: _half_input_gradient,
    Pass.WEIGHT_GRADIENT: _half_weight_gradient,
}
_TF32 = {
    Pass.RESULT: _tf32_result,
    Pass.INPUT_GRADIENT: _tf32_input_gradient,
    Pass.WEIGHT_GRADIENT: _tf32_weight_gradient,
}


def precision_of(dtype: torch.dtype, allows_tf32: bool) -> Precision:
    """Return how a Hopper GPU multiplies tensors of a dtype in a convolution."""
    if dtype is torch.float16:
        return Precision.FP16
    if dtype is torch.bfloat16:
        return Precision.BF16
    return Precision.TF32 if dtype is torch.float32 and allows_tf32 else Precision.FP32
