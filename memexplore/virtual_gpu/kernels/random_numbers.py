"""Memory of kernels that draw random numbers: dropout and multinomial.

In: the op's arguments. Out: `Requests`. Sources are below aten/src/ATen/native.
"""

from __future__ import annotations

from typing import Any

from memexplore.virtual_gpu.kernels.plan import Free, Output, Requests, Scratch
from memexplore.virtual_gpu.kernels.shapes import argument, nbytes


def dropout(args: Any, kwargs: Any, outputs: list[Any]) -> Requests:
    """The mask, then the result: dropout_cuda in cuda/Dropout.cu, order as recorded with torch 2.1.

    native_dropout_cuda has a short cut where all or nothing is dropped, which makes the result first.
    """
    p, train = args[1], argument(args, kwargs, 2, "train")
    return [Output(0), Output(1)] if train is False or p == 1 else [Output(1), Output(0)]


def multinomial(args: Any, kwargs: Any, outputs: list[Any]) -> Requests | None:
    """One sample, or several without replacement: exponential noise of the input's size (Distributions.cpp)."""
    weights, samples = args[:2]
    if samples != 1 and argument(args, kwargs, 2, "replacement", False):
        return None
    # Each of the three checks of the weights makes masks and one flag; the noise is divided by in place.
    size = weights.numel()
    return [Scratch(size), Scratch(size), Free(0), Free(1), Scratch(nbytes(weights)), Output(0)]
