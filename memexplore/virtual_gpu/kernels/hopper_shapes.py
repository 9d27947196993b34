"""Shapes and precision of a convolution in cuDNN on a Hopper GPU, and the bytes of its converted operands.

Kernels of tensor cores read and write channels last, with channels padded to 16 bytes.
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
    """Return how a Hopper GPU multiplies tensors of a dtype in a convolution."""
    if dtype is torch.float16:
        return Precision.FP16
    if dtype is torch.bfloat16:
        return Precision.BF16
    return Precision.TF32 if dtype is torch.float32 and allows_tf32 else Precision.FP32
