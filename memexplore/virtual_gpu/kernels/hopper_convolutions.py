"""Workspaces of cuDNN's convolutions on Hopper GPUs: shapes go in, bytes come out.

cuDNN's heuristics are not public. The rules follow 14 400 convolutions that were measured with torch 2.11 and cuDNN
9.19 on an H100 (40 shapes of layers, 1 to 64 images, 7 to 256 pixels a side). Kernels of tensor cores read and write
channels last, so contiguous operands are converted inside the workspace, with channels padded to 16 bytes; small
products run without. The gradient of the weight is summed in parts, in float32, where one part would leave processors
idle.
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
_TILE = 128
"""Rows and columns of a product that one multiprocessor computes."""


class Pass(enum.Enum):
    """What a convolution computes."""

    RESULT = "the result"
    INPUT_GRADIENT = "the gradient of the input"
    WEIGHT_GRADIENT = "the gradient of the weight"


class Precision(enum.Enum):
    """How a convolution multiplies; the value is the bytes of an element."""

    FP32 = "float32"
    TF32 = "tensor cores, float32"
    HALF = "tensor cores, 16 bits"

    @property
    def itemsize(self) -> int:
        """Bytes of an element."""
        return 2 if self is Precision.HALF else 4


class Convolution(NamedTuple):
    """A convolution without groups, by the shapes of its operands."""

    source: Sequence[int]
    weight: Sequence[int]
    result: Sequence[int]
    stride: int
    precision: Precision
    channels_last: bool

    @property
    def reduction(self) -> int:
        """Number of products that are summed for an element of the result."""
        return math.prod(self.weight[1:])

    @property
    def pixels(self) -> int:
        """Number of results of one channel."""
        return self.result[0] * math.prod(self.result[2:])

    @property
    def products(self) -> int:
        """Number of multiplications."""
        return self.pixels * self.weight[0] * self.reduction

    @property
    def is_pointwise(self) -> bool:
        """Whether the window is one pixel."""
        return math.prod(self.weight[2:]) == 1

    @property
    def is_patchwise(self) -> bool:
        """Whether windows do not overlap and are larger than a pixel."""
        return self.stride > 1 and set(self.weight[2:]) == {self.stride}

    @property
    def is_aligned(self) -> bool:
        """Whether the channels of the input fill 16 bytes each."""
        return self.weight[1] * self.precision.itemsize % 16 == 0

    def converted(self, *shapes: Sequence[int]) -> int:
        """Return the bytes of operands with their channels padded, and what belongs to a converting kernel."""
        elements = 16 // self.precision.itemsize
        padded = ((shape[0], -(-shape[1] // elements) * elements, *shape[2:]) for shape in shapes)
        return sum(map(math.prod, padded)) * self.precision.itemsize + _CONVERTED


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
        return _all(convolution) if converts else 0
    return _RULES[of](convolution)


def _all(convolution: Convolution) -> int:
    return convolution.converted(convolution.source, convolution.weight, convolution.result)


def _of_result(convolution: Convolution) -> int:
    source_and_weight = convolution.converted(convolution.source, convolution.weight)
    if convolution.channels_last:
        is_small = convolution.reduction <= 32 or convolution.products <= 2_000_000
        return 0 if convolution.is_aligned or is_small else source_and_weight
    if convolution.is_pointwise and (convolution.precision is Precision.TF32 or convolution.stride == 1):
        return 0
    channels = convolution.weight[0]
    if convolution.precision is Precision.HALF:
        if convolution.reduction <= 136:
            return _all(convolution) if channels > 288 and convolution.pixels > 14_464 else 0
        return _all(convolution) if convolution.reduction > 272 or channels <= 40 else 0
    if convolution.reduction <= 272:
        return 0
    if convolution.products <= 230_000_000:
        return 0 if convolution.weight[1] <= 40 and convolution.pixels <= 7_232 else source_and_weight
    return _all(convolution)


def _of_input_gradient(convolution: Convolution) -> int:
    if convolution.channels_last:
        if convolution.is_aligned:
            return 0
        whole = convolution.precision is Precision.TF32 or convolution.reduction <= 20 or convolution.stride > 3
        return _all(convolution) if whole else convolution.converted(convolution.source, convolution.weight)
    if convolution.is_pointwise and convolution.stride == 1:
        return 0
    if convolution.precision is Precision.HALF:
        if convolution.is_pointwise:
            return convolution.converted(convolution.source, convolution.result)
        return _all(convolution)
    if convolution.is_patchwise:
        return _all(convolution)
    if convolution.products <= 136_000_000:
        return 0
    return _all(convolution) if convolution.reduction > 272 or convolution.weight[0] <= 24 else 0


def _of_weight_gradient(convolution: Convolution) -> int:
    if convolution.products < 2_400_000:
        return 0
    partial = 4 * math.prod(convolution.weight)
    tiles = -(-convolution.weight[0] // _TILE) * -(-convolution.reduction // _TILE)
    parts = min(_PROCESSORS // tiles, max(convolution.pixels // 256, 1))
    operands = (math.prod(convolution.source) + math.prod(convolution.result)) * convolution.precision.itemsize
    sums = min(parts, operands // (2 * partial)) * partial if parts > 1 else 0
    if convolution.is_pointwise or (convolution.channels_last and convolution.is_aligned):
        return sums
    if convolution.precision is Precision.HALF and not convolution.channels_last:
        return _all(convolution) + sums
    if not convolution.channels_last and convolution.products < 7_900_000:
        return 0
    return convolution.converted(convolution.source, convolution.result) + sums


_RULES = {
    Pass.RESULT: _of_result,
    Pass.INPUT_GRADIENT: _of_input_gradient,
    Pass.WEIGHT_GRADIENT: _of_weight_gradient,
}


def precision_of(dtype: torch.dtype, allows_tf32: bool) -> Precision:
    """Return how a Hopper GPU multiplies tensors of a dtype in a convolution."""
    if dtype in (torch.float16, torch.bfloat16):
        return Precision.HALF
    return Precision.TF32 if dtype is torch.float32 and allows_tf32 else Precision.FP32
