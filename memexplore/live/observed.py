"""Describe the last call of the model as plain values, without keeping its tensors.

Each tensor is described by its shape, dtype and device; a small one on the CPU, such as lengths, by its values too.
"""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple, TypeVar

import numpy as np
import torch

from memexplore.live.store import Call
from memexplore.run.knobs.applying.forward import device_of
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


class Observer:
    """Keeps the last call of a model whose inputs had new shapes, at most one in `_SECONDS`."""

    def __init__(self) -> None:
        self.call: ObservedCall | None = None
        self.step = 0
        """The last step with such a call."""
        self.is_last = False
        """Whether the last call of the model was like `call`."""
        self._seen: tuple[Call, float] | None = None
        self._output: list[Callable[[], Any]] = []
        """References to the leaves of the last output."""
        self._next = 0.0

    def see(
        self,
        model: torch.nn.Module,
        call: Call,
        step: int,
        share: float,
        arguments: tuple[str, Any, Any],
        is_cast: bool = False,
    ) -> bool:
        """Keep a call of a model: shapes, step and share, and method, `args` and `kwargs`; return whether it is new.

        `is_cast` tells that the setting in effect decides about autocast: what is around the call is not the loop's.
        """
        if self._seen == (call, share):
            self.step, self.is_last = step, True
            return False
        self.is_last = time.monotonic() >= self._next
        if not self.is_last:
            return False
        device, (method, args, kwargs) = device_of(model).type, arguments
        cast = (device, torch.get_autocast_dtype(device)) if torch.is_autocast_enabled(device) else None
        if is_cast:
            cast = None if self.call is None else self.call.autocast
        named = None if kwargs is None else template(kwargs)
        self.call = ObservedCall(template(args), named, method, cast, share)
        self._seen, self.step = (call, share), step
        self._next = time.monotonic() + _SECONDS
        return True

    def returned(self, output: _T) -> _T:
        """Return the output of a call, which is noted."""
        self._output = [_reference(leaf) for leaf in leaves(output)]
        return output

    def before_update(self) -> None:
        """Note what the loop still holds of the output; the graph, which may hold it too, is gone after backward."""
        held, self._output = tuple(leaf() is not None for leaf in self._output), []
        if self.call is not None and held and self.call.held != held:
            self.call = self.call._replace(held=held)


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


def _reference(leaf: Any) -> Callable[[], Any]:
    try:
        return weakref.ref(leaf)
    except TypeError:  # such as a number
        return lambda: None


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
