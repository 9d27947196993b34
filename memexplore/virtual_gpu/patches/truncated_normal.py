"""Run `trunc_normal_`, which draws again until no value lies outside, as often as may be expected."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from memexplore.torch_internals import modules as internals
from memexplore.torch_internals.dispatch import FLATTEN
from memexplore.virtual_gpu.patches.install import Patch, Replace
from memexplore.virtual_gpu.tensors.tensor import is_virtual

_DRAWS_AGAIN = (2, 13)
"""The first release that does so (torch/nn/init.py); those before compute all values in place."""
_LEAST_INSIDE = 0.3
"""Up to this probability uniform values are proposed, beyond it normal ones (torch/nn/init.py)."""


def patches(release: tuple[int, int]) -> list[Patch]:
    """Return the patch of `trunc_normal_` for a torch release."""

    def make(original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def truncated_normal(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
            if not any(map(is_virtual, _inner(tensor))):
                return original(tensor, *args, **kwargs)
            if release >= _DRAWS_AGAIN and tensor.is_cuda:
                with _Outside(passes(tensor.numel(), *args)):
                    original(tensor, *args, **kwargs)
            return tensor

        return truncated_normal

    return [Replace(*internals.TRUNCATED_NORMAL, make(internals.TRUNCATED_NORMAL.value))]


def passes(number: int, mean: float, std: float, low: float, high: float, *rest: Any) -> int:
    """Return how often values are drawn again, if each time the expected part of a number of values lies outside.

    Of a million values within two standard deviations 4.55 % are outside, then 4.55 % of those:

    >>> passes(1_000_000, 0.0, 1.0, -2.0, 2.0)
    4
    """
    below, above = ((1 + math.erf((bound - mean) / std / math.sqrt(2))) / 2 for bound in (low, high))
    accepted = above - below
    if accepted <= _LEAST_INSIDE:
        # The area below the density, whose largest value is made 1, as a part of the rectangle around it.
        highest = math.exp(-0.5 * ((max(low, min(mean, high)) - mean) / std) ** 2)
        accepted *= std * math.sqrt(2 * math.pi) / highest / (high - low)
    outside, again = number * (1 - accepted), 0
    while outside >= 0.5 and accepted > 0:
        outside, again = outside * (1 - accepted), again + 1
    return again


class _Outside(TorchFunctionMode):
    """Answers `any()` in its block: a number of times yes, then no."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self._left = number

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func is not torch.Tensor.any:
            return result
        self._left -= 1
        return self._left >= 0


def _inner(tensor: torch.Tensor) -> Iterable[Any]:
    """Return what a wrapper such as a DTensor consists of, which also has its mesh, or the tensor itself."""
    if not hasattr(tensor, FLATTEN):
        return (tensor,)
    return (getattr(tensor, name) for name in getattr(tensor, FLATTEN)()[0])
