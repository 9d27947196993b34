"""Find the workspaces of cuDNN's convolutions on tensor cores from the shapes of their operands.

cuDNN's heuristics are not public. The rules follow 32 600 convolutions that were measured with torch 2.11 and cuDNN
9.19 on an H100 (67 shapes of layers, 1 to 256 images, 5 to 256 pixels a side), with the names and grids of their
kernels. These tell what a workspace holds: operands that are converted for tensor cores, or transformed operands. In 16
bits cuDNN mostly chooses the same kernel for both memory formats, and converts where it must. Kernels of tensor cores
read and write channels last, with channels padded to 16 bytes.

Which kernel runs is learned inside cuDNN: the thresholds are where the measured choices change. The rules hold as well
in 9 200 convolutions that were measured before, without names: one, two, and three dimensions, other shapes.

No workspace was measured on a GPU before Hopper. Published peaks of networks on an A100, and in 16 bits on a T4
(docs/accuracy.md), are nearer to these rules than to any other that was tried, with one exception:
`_reads_channels_first`.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Sequence
from typing import NamedTuple

import torch

_CONVERTED = 16
"""Bytes of a workspace beside the converted operands."""


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
    dilation: int = 1

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
    def image(self) -> int:
        """Number of results of one channel of one image."""
        return math.prod(self.result[2:])

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

    @property
    def is_patchwise(self) -> bool:
        """Whether windows do not overlap and are larger than a pixel."""
        return self.stride > 1 and set(self.weight[2:]) == {self.stride}

    @property
    def is_square(self) -> bool:
        """Whether a window of two dimensions has equal sides and no gaps, and moves by a pixel."""
        return len(self.weight) == 4 and len(set(self.weight[2:])) == self.stride == self.dilation == 1

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
    def is_first_layer(self) -> bool:
        """Whether it is the first layer of a ResNet in float16, contiguous, which cuDNN has a kernel for."""
        window = self.side == 7 and self.stride == 2 and self.inputs <= 4 and len(self.weight) == 4
        return window and self.precision is Precision.FP16 and not self.channels_last

    @property
    def for_first_layer(self) -> int:
        """Bytes of the operands for the kernel of a first layer, with four channels of the input."""
        pixels = self.source[0] * math.prod(self.source[2:]) + self.outputs * self.window
        return (4 * pixels + math.prod(self.result)) * self.precision.itemsize + _CONVERTED

    @property
    def for_tensor_cores(self) -> int:
        """Bytes of the operands that are converted for tensor cores: those that are not aligned and channels last."""
        if not self.channels_last:
            return self.padded(weight=not self.is_pointwise)
        inputs, outputs = not self.is_aligned(self.inputs), not self.is_aligned(self.outputs)
        return self.padded(source=inputs, weight=inputs or outputs, result=outputs)


def precision_of(dtype: torch.dtype, allows_tf32: bool) -> Precision:
    """Return how a GPU with TF32 multiplies tensors of a dtype in a convolution."""
    if dtype is torch.float16:
        return Precision.FP16
    if dtype is torch.bfloat16:
        return Precision.BF16
    return Precision.TF32 if dtype is torch.float32 and allows_tf32 else Precision.FP32


HOPPER = (9, 0)
"""Compute capability of the GPU that was measured."""


def workspace(convolution: Convolution, of: Pass, capability: tuple[int, int] = HOPPER) -> int:
    """Return the bytes of the workspace on a GPU of a compute capability, 0 for none.

    >>> shapes = (8, 64, 56, 56), (64, 64, 3, 3), (8, 64, 56, 56)
    >>> workspace(Convolution(*shapes, 1, Precision.TF32, channels_last=False), Pass.RESULT)  # all three, converted
    12992528
    >>> workspace(Convolution(*shapes, 1, Precision.TF32, channels_last=True), Pass.RESULT)
    0
    """
    if not convolution.products or (of is Pass.RESULT and _reads_channels_first(convolution, capability)):
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


class Assumption(enum.Enum):
    """What may be otherwise than `workspace` says, for all convolutions of a run alike.

    Replays with these are the range of a prediction. They were chosen among fourteen: with them the range holds the
    most published and measured peaks for its width (docs/accuracy.md). What was not measured on GPUs before Hopper,
    `_reads_channels_first`, may not hold there.
    """

    AS_PREDICTED = "as predicted"
    FEW_CHANNELS = "results of few channels of the input are computed without conversion, before Hopper with it"
    NO_PARTIAL_SUMS = "weight gradients are not summed in parts"
    FIRST_LAYER_CONVERTED = "weight gradients of images (up to four channels) are computed by tensor cores"


def possible_workspaces(convolution: Convolution, of: Pass, capability: tuple[int, int] = HOPPER) -> tuple[int, ...]:
    """Return the bytes of the workspace under each `Assumption`, in their order.

    >>> shapes = (8, 64, 56, 56), (64, 64, 3, 3), (8, 64, 56, 56)
    >>> possible_workspaces(Convolution(*shapes, 1, Precision.TF32, channels_last=False), Pass.RESULT)
    (12992528, 0, 12992528, 12992528)
    """
    predicted = workspace(convolution, of, capability)
    sizes = dict.fromkeys(Assumption, predicted)
    if convolution.products and convolution.precision is not Precision.FP32:
        if of is Pass.RESULT and _reads_channels_first(convolution, capability):
            sizes[Assumption.FEW_CHANNELS] = convolution.for_tensor_cores
        elif of is Pass.RESULT and convolution.inputs <= 64 and not convolution.channels_last:
            sizes[Assumption.FEW_CHANNELS] = 0
        if of is Pass.WEIGHT_GRADIENT:
            sizes[Assumption.NO_PARTIAL_SUMS] = min(predicted, convolution.for_tensor_cores)
            if convolution.inputs <= 4 and not convolution.is_pointwise:
                sizes[Assumption.FIRST_LAYER_CONVERTED] = max(predicted, convolution.for_tensor_cores)
    return tuple(sizes.values())


# --- results and gradients of inputs --------------------------------------------------------------------------------


def _reads_channels_first(convolution: Convolution, capability: tuple[int, int]) -> bool:
    """Return whether a kernel of Ampere computes a result in float32 from operands as they are.

    Not measured. With this the peaks of VGG16 and Inception on an A100 are within 4 % of CARMA's readings, and without
    it up to 19 % off; those of generated networks with aligned channels come nearer too.
    """
    aligned = convolution.is_aligned(convolution.inputs) and convolution.is_aligned(convolution.outputs)
    is_contiguous = convolution.precision is Precision.TF32 and not convolution.channels_last
    return capability < HOPPER and is_contiguous and aligned and convolution.inputs <= 128 and convolution.window > 1


def _pointwise_result(convolution: Convolution) -> int:
    """A window of one pixel is a matrix product in memory, unless it skips pixels: then operands are converted."""
    if convolution.stride > 1 and not convolution.is_half and not convolution.channels_last:
        # A kernel writes channels first where there are many pixels and few channels, as in ResNet-50.
        writes = convolution.inputs <= 256 and convolution.pixels > 16_000
        return convolution.padded(weight=False, result=not writes)
    converts = convolution.stride > 1 or _has_odd_images(convolution)
    return convolution.for_tensor_cores if converts and not convolution.channels_last else 0


def _has_odd_images(convolution: Convolution) -> bool:
    """Return whether tensor cores cannot read the images where they are, which do not all begin at 8 bytes.

    They are copied where there is enough to compute.
    """
    return convolution.image * convolution.precision.itemsize % 8 > 0 and convolution.products > 182_000_000


def _pointwise_input_gradient(convolution: Convolution) -> int:
    """As of the result, except that more of the small images are converted."""
    pairs = convolution.inputs * convolution.outputs
    if convolution.is_half:
        small = convolution.image <= 64 and pairs >= 200_000
    else:
        small = 500 < convolution.pixels < 45_000 and pairs >= 1_000_000
    converts = convolution.stride > 1 or small or _has_odd_images(convolution)
    return convolution.for_tensor_cores if converts and not convolution.channels_last else 0


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
    return (pairs + 2 * convolution.result[0] * channels) * 32 * (32 // 2 + 1) * _COMPLEX


# --- gradients of weights -------------------------------------------------------------------------------------------

# The gradient of a weight sums over all pixels. Where one sum leaves processors idle, parts of it are kept in float32:
# whole weights, or the tiles of a weight that processors share. Winograd's algorithm and Fourier transforms keep
# transformed operands instead.

_PROCESSORS = 132

_HALF_PROCESSORS = 120
"""Processors that kernels of 16 bits divide tiles among: those are in groups, which do not fill all of a GPU."""

_SUM = 4
"""Bytes of an element of a partial sum."""

_COMPLEX = 8
"""Bytes of a number of a Fourier transform."""


def weight_gradient(convolution: Convolution) -> int:
    """Return the bytes of the workspace of the gradient of a weight, 0 for none.

    >>> shapes = (32, 32, 32, 32), (64, 32, 5, 5), (32, 64, 32, 32)
    >>> weight_gradient(Convolution(*shapes, 1, Precision.TF32, channels_last=False))  # by Fourier transforms
    112197632
    """
    if convolution.precision is Precision.FP32:
        return _fp32_weight_gradient(convolution)
    if convolution.is_pointwise:
        return _pointwise_weight_gradient(convolution)
    return _half_weight_gradient(convolution) if convolution.is_half else _tf32_weight_gradient(convolution)


def _fp32_weight_gradient(convolution: Convolution) -> int:
    few = convolution.inputs < 64 and convolution.pixels > 45_000
    if convolution.side != 3 or convolution.inputs < 32 or few or convolution.products < 5_000_000:
        return 0
    if convolution.is_square:
        return _winograd(convolution) + (convolution.operands if convolution.channels_last else 0)
    dilated = convolution.dilation > 1 and not convolution.channels_last and convolution.pixels > 200
    return convolution.padded() if dilated else 0


def _pointwise_weight_gradient(convolution: Convolution) -> int:
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
        if convolution.precision is Precision.BF16 and convolution.is_square and convolution.side in (3, 5):
            return _winograd(convolution)
    if convolution.is_first_layer and pixels > 150_000:
        return convolution.for_first_layer + 8 * 4 * convolution.outputs * convolution.window * _SUM + 600
    return converted + _weight_sums(convolution)


def _tf32_weight_gradient(convolution: Convolution) -> int:
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
    transforms = max(images * channels, pairs) * side * (side // 2 + 1) * _COMPLEX
    return math.prod(convolution.result) * convolution.precision.itemsize + 2 * transforms
