"""Let `torch.optim.LBFGS` run its iterations where loss and gradients are unknown.

Where a parameter or a gradient is unknown, a step runs all `max_iter` iterations, and a line search accepts its first
point. With unknown values as 1, a step would end in its first iteration, before any of the history was allocated.
"""

from __future__ import annotations

import functools
import math
import threading
from collections.abc import Callable
from typing import Any

import torch

from memexplore.torch_internals.modules import STRONG_WOLFE
from memexplore.virtual_gpu.patches.install import Replace
from memexplore.virtual_gpu.tensors.tensor import is_virtual
from memexplore.virtual_gpu.values import known_values, notes

_NEVER, _AT_ONCE = -math.inf, math.inf
"""Tolerances of a change: no change is below the first, and every change is below the second."""
_local = threading.local()
"""`is_unknown`: whether this thread runs a step with unknown values."""


def rows() -> list[Replace]:
    """Return the replaced functions."""
    return [
        Replace(torch.optim.LBFGS, "step", _stepping(torch.optim.LBFGS.step)),
        Replace(*STRONG_WOLFE, _searching(STRONG_WOLFE.value)),
    ]


def _stepping(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def step(self: torch.optim.LBFGS, *args: Any, **kwargs: Any) -> Any:
        group = self.param_groups[0]
        if not any(_is_unknown(parameter) for parameter in group["params"]):
            return original(self, *args, **kwargs)
        notes.assume("a step of LBFGS runs to max_iter, and a line search accepts its first point")
        tolerance = group["tolerance_change"]
        try:
            group["tolerance_change"], _local.is_unknown = _NEVER, True
            return original(self, *args, **kwargs)
        finally:
            group["tolerance_change"], _local.is_unknown = tolerance, False

    return step


def _is_unknown(parameter: torch.Tensor) -> bool:
    tensors = [parameter] if parameter.grad is None else [parameter, parameter.grad]
    return any(is_virtual(tensor) and not known_values.is_known(tensor) for tensor in tensors)


def _searching(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def strong_wolfe(*args: Any, **kwargs: Any) -> Any:
        if getattr(_local, "is_unknown", False):
            kwargs["tolerance_change"] = _AT_ONCE
        return original(*args, **kwargs)

    return strong_wolfe
