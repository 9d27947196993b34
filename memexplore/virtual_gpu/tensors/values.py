"""What user code gets when it asks a virtual tensor for a value.

One rule: **every virtual value counts as 1**, so that guards such as `isfinite(loss)` pass, nothing divides by zero and
GradScaler steps (its `found_inf` counts as 0). Whatever is printed says `virtual`. A `while` loop that turns on a value
cannot be simulated and ends in one clear error.
"""

from __future__ import annotations

import re
from typing import Any

import torch

from memexplore.torch_internals.tensors import PARAMETER_MARK
from memexplore.virtual_gpu.tensors import value_hints, value_loops
from memexplore.virtual_gpu.tensors.value_loops import NotSimulated as NotSimulated
from memexplore.virtual_gpu.tensors.value_loops import user_frame as user_frame


def _virtual(value: Any) -> Any:
    if type(value) is float:
        return VirtualFloat(value)
    return VirtualInt(value) if type(value) is int else value


def _computing(base: Any, name: str) -> Any:
    method = getattr(base, name)

    def compute(self: Any, *others: Any) -> Any:
        return _virtual(method(self, *others))

    return compute


def _comparing(base: Any, name: str) -> Any:
    method = getattr(base, name)

    def compare(self: Any, other: Any) -> Any:
        return _asked(method(self, other))

    return compare


def _number(kind: Any) -> Any:
    """Give a class of numbers its operators: what is computed from a virtual number is virtual too."""
    base = kind.__mro__[1]
    unary = ("neg", "pos", "abs")
    binary = ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow")
    for name in (*unary, *binary, *(f"r{name}" for name in binary)):
        setattr(kind, f"__{name}__", _computing(base, f"__{name}__"))
    for name in ("lt", "le", "gt", "ge", "eq", "ne"):
        setattr(kind, f"__{name}__", _comparing(base, f"__{name}__"))
    kind.__bool__, kind.__hash__ = _decide, base.__hash__
    return kind


def _decide(self: Any) -> bool:
    return _asked(self != 0)


class _Shown:
    """Prints as `virtual`, in the width that was asked for."""

    def __repr__(self) -> str:
        return "virtual"

    __str__ = __repr__

    def __format__(self, spec: str) -> str:
        found = re.match(r"(?:.?([<>=^]))?[+\- ]?#?0?(\d*)", spec)
        align, width = found.groups() if found else (None, "")
        return format("virtual", f"{'>' if align in (None, '=') else align}{width}")


@_number
class VirtualFloat(float, _Shown):
    """The value 1.0 that is no result: it prints as `virtual`, and a loop that turns on it ends in an error."""

    __repr__, __str__, __format__ = _Shown.__repr__, _Shown.__str__, _Shown.__format__

    def __round__(self, ndigits: Any = None) -> Any:
        return self


@_number
class VirtualInt(int, _Shown):
    """The value 1 that is no result: it prints as `virtual`, but counts as an int wherever one is needed."""

    __repr__, __str__, __format__ = _Shown.__repr__, _Shown.__str__, _Shown.__format__


def number(dtype: torch.dtype, value: int = 1) -> Any:
    """The Python number that stands for one element of a virtual tensor.

    >>> loss = number(torch.float32)
    >>> print(loss, f"{loss / 3:.4f}", loss > 0)
    virtual virtual True
    """
    if dtype is torch.bool:
        return bool(value)
    if dtype.is_complex:
        return complex(value)
    return VirtualFloat(value) if dtype.is_floating_point else VirtualInt(value)


def item(tensor: torch.Tensor) -> Any:
    """The value of a one-element virtual tensor, by the rule above."""
    if tensor.numel() != 1:
        raise RuntimeError(f"a Tensor with {tensor.numel()} elements cannot be converted to Scalar")
    value = number(tensor.dtype, value_hints.of(tensor).value)
    if type(value) is bool:
        return _asked(value)
    value_loops.asked(decides=False)
    if isinstance(value, VirtualInt):
        assume("the value of an integer tensor counted as 1")
    return value


def truth(tensor: torch.Tensor) -> bool:
    """What `if tensor:` sees, by the rule above."""
    if tensor.numel() != 1:
        raise RuntimeError("Boolean value of Tensor with more than one value is ambiguous")
    return _asked(bool(value_hints.of(tensor).value))


def tolist(tensor: torch.Tensor) -> Any:
    """Nested lists of virtual numbers in the tensor's shape."""

    if not tensor.is_floating_point():
        assume("the values of an integer tensor counted as 1")

    def build(shape: tuple[int, ...]) -> Any:
        if not shape:
            return number(tensor.dtype)
        return [build(shape[1:]) for _ in range(shape[0])]

    return build(tuple(tensor.shape))


def numpy(tensor: torch.Tensor) -> Any:
    """A numpy array of the tensor's shape in which every element is masked: it prints as ``--``."""
    import numpy

    dtype = numpy.float32 if tensor.dtype is torch.bfloat16 else torch.empty(0, dtype=tensor.dtype).numpy().dtype
    return numpy.ma.masked_all(tuple(tensor.shape), dtype)


def text(tensor: torch.Tensor) -> str:
    """How a virtual tensor prints: shape and type, never a value."""
    if tensor.dim() == 0:
        return f"virtual({str(tensor.dtype).removeprefix('torch.')}, device='{tensor.device}')"
    extra = ", requires_grad=True" if tensor.requires_grad and tensor.is_leaf else ""
    name = "Parameter containing:\n" if getattr(tensor, PARAMETER_MARK, False) else ""
    return f"{name}virtual(shape={tuple(tensor.shape)}, dtype={tensor.dtype}, device='{tensor.device}'{extra})"


# The device that is on takes note of assumptions; None while none is on.
assumptions: dict[str, None] = {}
noted: list[str] = []
"""What was noted since somebody emptied it: a plan says it again whenever it is carried out."""


def reset() -> None:
    """Start a run: no assumption made, no loop counted."""
    assumptions.clear()
    noted.clear()
    value_loops.reset()


def note(what: str) -> None:
    """Tell with the tape how a number was come by; once, without a line."""
    assumptions.setdefault(what)
    noted.append(what)


def assume(what: str) -> None:
    """Note an assumption, with the line of the user's code that needed it."""
    frame = value_loops.user_frame()
    place = f" ({value_loops.where(frame)})" if frame is not None else ""
    assumptions.setdefault(f"assumed: {what}{place}")


def _asked(answer: bool) -> bool:
    """Let code turn on a virtual value, unless that makes a loop without end."""
    value_loops.asked()
    return answer
