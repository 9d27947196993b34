"""Describe the last call of the model as plain values, without keeping its tensors.

Each tensor is described by its shape, dtype and device; a small one on the CPU, such as lengths, by its values too.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple, TypeVar

import numpy as np
import torch

from memexplore.virtual_gpu.tensors.tensor import is_virtual

_T = TypeVar("_T")
_SECONDS = 0.2
"""Least time between two copies of arguments, which take as long as a light step's hooks."""
_MOST_BYTES = 1 << 16
"""Size up to which values on the CPU are copied."""
_DEPTH = 8
"""Depth to which arguments and outputs are read: one may contain itself."""
_OF_NUMPY = (torch.bool, torch.uint8, torch.int32, torch.int64, torch.float32, torch.float64)
_PLAIN = (int, float, complex, str, bytes, bool, type(None), slice, torch.dtype, torch.device, torch.Size)


class TensorLike(NamedTuple):
    """A tensor without its memory."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    device: str
    """Type of the device."""
    requires_grad: bool
    values: np.ndarray[Any, Any] | None
    """A copy of the values of a small tensor on the CPU."""


class Unknown(NamedTuple):
    """An argument of another type, which cannot be sent to another process."""

    kind: str


class ObservedCall(NamedTuple):
    """One call of a model with gradients."""

    args: Any
    kwargs: Any
    """None where the hook that saw the call does not get them."""
    method: str
    """Name of the function that was called, such as ``training_step``."""
    autocast: tuple[str, torch.dtype] | None
    """Device type and dtype of the autocast around the call, None without one."""
    share: float
    """Share of the batch's samples, as `InLoop.micro_batches` splits it."""
    held: tuple[bool, ...] = ()
    """For each of the `leaves` of the output whether the loop held it when its optimizer stepped, as ``logits, loss =
    model(x, y)`` does."""


def leaves(value: Any, depth: int = _DEPTH) -> Iterator[Any]:
    """Return what tuples, lists and dicts inside of each other, down to a depth, have in them, in order.

    >>> list(leaves((1, {"loss": 2, "more": [3]})))
    [1, 2, 3]
    """
    if depth and isinstance(value, tuple | list | dict):
        for part in value.values() if isinstance(value, dict) else value:
            yield from leaves(part, depth - 1)
    else:
        yield value


def template(value: Any, depth: int = _DEPTH) -> Any:
    """Return a value with tensors as `TensorLike` and mappings as dicts.

    >>> template(({"x": torch.zeros(2, 3, device="meta")}, 7))
    ({'x': TensorLike(shape=(2, 3), dtype=torch.float32, device='meta', requires_grad=False, values=None)}, 7)
    """
    if isinstance(value, torch.Tensor):
        # Copied by numpy, so that a recording of the CPU does not see the copy.
        plain = type(value) is torch.Tensor and not is_virtual(value) and value.layout is torch.strided
        keeps = plain and value.device.type == "cpu" and value.nbytes <= _MOST_BYTES and value.dtype in _OF_NUMPY
        values = np.array(value.detach().numpy()) if keeps else None
        return TensorLike(tuple(value.shape), value.dtype, value.device.type, value.requires_grad, values)
    if isinstance(value, _PLAIN):
        return value
    if depth and isinstance(value, Mapping):
        return {key: template(part, depth - 1) for key, part in value.items()}
    kind = type(value)
    # Other subclasses, such as `PackedSequence`, cannot be made of templates.
    is_named = kind.__bases__ == (tuple,) and hasattr(kind, "_fields")
    if depth and (kind in (tuple, list) or is_named):
        parts = [template(part, depth - 1) for part in value]
        return kind(*parts) if is_named else kind(parts)
    return Unknown(kind.__name__)


def unknown_in(value: Any) -> str:
    """Return the type of an argument that a template does not hold, "" if it holds all.

    >>> unknown_in({"cache": Unknown("DynamicCache")}), unknown_in((1, [2]))
    ('DynamicCache', '')
    """
    if isinstance(value, Unknown):
        return value.kind
    if isinstance(value, TensorLike):
        return ""
    parts = value.values() if isinstance(value, dict) else value if isinstance(value, tuple | list) else ()
    return next(filter(None, map(unknown_in, parts)), "")
