"""Values of virtual tensors as user code reads them: `item()`, `if tensor:`, `tolist()`, `numpy()`, printing.

One rule: **every virtual value counts as 1**, so that guards such as `isfinite(loss)` pass, nothing divides by zero and
GradScaler steps (its `found_inf` counts as 0). Printed values read `virtual`. A `while` loop whose end depends on a
value cannot be simulated and ends in one clear error.

In: a virtual tensor. Out: Python numbers that stand for its values. Assumptions made and notes for the tape are
collected in `assumptions`.
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
        return _decide_by(method(self, other))

    return compare


def _with_operators(kind: Any) -> Any:
    """Give a class of numbers its operators: results computed from a virtual number are virtual too."""
    base = kind.__mro__[1]
    unary = ("neg", "pos", "abs")
    binary = ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow")
    for name in (*unary, *binary, *(f"r{name}" for name in binary)):
        setattr(kind, f"__{name}__", _computing(base, f"__{name}__"))
    for name in ("lt", "le", "gt", "ge", "eq", "ne"):
        setattr(kind, f"__{name}__", _comparing(base, f"__{name}__"))
    kind.__bool__, kind.__hash__ = _is_nonzero, base.__hash__
    return kind


def _is_nonzero(self: Any) -> bool:
    return _decide_by(self != 0)


class _Printed:
    """Prints as `virtual`, in the width of the format specification."""

    def __repr__(self) -> str:
        return "virtual"

    __str__ = __repr__

    def __format__(self, spec: str) -> str:
        match = re.match(r"(?:.?([<>=^]))?[+\- ]?#?0?(\d*)", spec)
        align, width = match.groups() if match else (None, "")
        return format("virtual", f"{'>' if align in (None, '=') else align}{width}")


@_with_operators
class VirtualFloat(float, _Printed):
    """The value 1.0 of a virtual tensor: prints as `virtual`; a loop whose end depends on it ends in an error."""

    __repr__, __str__, __format__ = _Printed.__repr__, _Printed.__str__, _Printed.__format__

    def __round__(self, ndigits: Any = None) -> Any:
        return self


@_with_operators
class VirtualInt(int, _Printed):
    """The value 1 of a virtual tensor: prints as `virtual`, and counts as an int wherever one is needed."""

    __repr__, __str__, __format__ = _Printed.__repr__, _Printed.__str__, _Printed.__format__


def number(dtype: torch.dtype, value: int = 1) -> Any:
    """Return the Python number that stands for one element of a virtual tensor.

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
    """Return the value of a one-element virtual tensor.

    Raises RuntimeError for several elements, NotSimulated in a loop that cannot end.
    """
    if tensor.numel() != 1:
        raise RuntimeError(f"a Tensor with {tensor.numel()} elements cannot be converted to Scalar")
    value = number(tensor.dtype, value_hints.of(tensor).value)
    if type(value) is bool:
        return _decide_by(value)
    value_loops.count_read(decides=False)
    if isinstance(value, VirtualInt):
        assume("the value of an integer tensor counted as 1")
    return value


def truth(tensor: torch.Tensor) -> bool:
    """Return the truth value of a one-element virtual tensor.

    Raises RuntimeError for several elements, NotSimulated in a loop that cannot end.
    """
    if tensor.numel() != 1:
        raise RuntimeError("Boolean value of Tensor with more than one value is ambiguous")
    return _decide_by(bool(value_hints.of(tensor).value))


def tolist(tensor: torch.Tensor) -> Any:
    """Return nested lists of virtual numbers in the tensor's shape."""
    if not tensor.is_floating_point():
        assume("the values of an integer tensor counted as 1")

    def build(shape: tuple[int, ...]) -> Any:
        if not shape:
            return number(tensor.dtype)
        return [build(shape[1:]) for _ in range(shape[0])]

    return build(tuple(tensor.shape))


def numpy(tensor: torch.Tensor) -> Any:
    """Return a masked numpy array of the tensor's shape; every element is masked and prints as ``--``."""
    import numpy

    dtype = numpy.float32 if tensor.dtype is torch.bfloat16 else torch.empty(0, dtype=tensor.dtype).numpy().dtype
    return numpy.ma.masked_all(tuple(tensor.shape), dtype)


def text(tensor: torch.Tensor) -> str:
    """Return the text that a virtual tensor prints as: shape and dtype, never a value."""
    if tensor.dim() == 0:
        return f"virtual({str(tensor.dtype).removeprefix('torch.')}, device='{tensor.device}')"
    extra = ", requires_grad=True" if tensor.requires_grad and tensor.is_leaf else ""
    name = "Parameter containing:\n" if getattr(tensor, PARAMETER_MARK, False) else ""
    return f"{name}virtual(shape={tuple(tensor.shape)}, dtype={tensor.dtype}, device='{tensor.device}'{extra})"


assumptions: dict[str, None] = {}
"""Assumptions and notes of the run, in order, for the tape."""
recent_notes: list[str] = []
"""Notes since the dispatch mode emptied it: a plan repeats the notes of its making whenever it is carried out."""


def reset() -> None:
    """Forget assumptions, notes and counts of loops, when a virtual GPU is turned on."""
    assumptions.clear()
    recent_notes.clear()
    value_loops.reset()


def note(text: str) -> None:
    """Add a note to the tape, once, such as that a workspace is an estimate."""
    assumptions.setdefault(text)
    recent_notes.append(text)


def assume(text: str) -> None:
    """Add an assumption to the tape, with the line of the user's code that needs it."""
    frame = value_loops.user_frame()
    line = f" ({value_loops.file_and_line(frame)})" if frame is not None else ""
    assumptions.setdefault(f"assumed: {text}{line}")


def _decide_by(value: bool) -> bool:
    """Return a virtual value by which code decides; raise NotSimulated if that makes an endless loop."""
    value_loops.count_read()
    return value
