"""Make Python numbers that stand for unknown values: they count as 1 and print as `virtual`.

`float(x)`, `int(x)` and ``"%.4f" % x`` give the plain number, as C code does that reads it. Tests and conversions are
counted, so that a loop whose end depends on an unknown value ends in an error (value_reads.py).
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

import torch

from memexplore.virtual_gpu.values import value_reads


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
        return decide_by(method(self, other))

    return compare


def _converting(base: Any, name: str) -> Any:
    method = getattr(base, name)

    def convert(self: Any) -> Any:
        value_reads.count_test()
        return method(self)

    return convert


def _with_operators(kind: Any) -> Any:
    """Give a class of numbers its operators, whose results are virtual too, and conversions to plain numbers."""
    base = kind.__mro__[1]
    unary = ("neg", "pos", "abs")
    binary = ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow")
    for name in (*unary, *binary, *(f"r{name}" for name in binary)):
        setattr(kind, f"__{name}__", _computing(base, f"__{name}__"))
    for name in ("lt", "le", "gt", "ge", "eq", "ne"):
        setattr(kind, f"__{name}__", _comparing(base, f"__{name}__"))
    for name in ("float", "int"):
        setattr(kind, f"__{name}__", _converting(base, f"__{name}__"))
    kind.__bool__, kind.__hash__ = _is_nonzero, base.__hash__
    return kind


def _is_nonzero(self: Any) -> bool:
    return decide_by(self != 0)


class Printed:
    """Base class of numbers that print as `virtual`, in the width of the format specification."""

    def __repr__(self) -> str:
        return "virtual"

    __str__ = __repr__

    def __copy__(self) -> Any:
        return self

    def __deepcopy__(self, memo: Any) -> Any:
        return self

    def __format__(self, spec: str) -> str:
        match = re.match(r"(?:.?([<>=^]))?[+\- ]?#?0?(\d*)", spec)
        align, width = match.groups() if match else (None, "")
        return format("virtual", f"{'>' if align in (None, '=') else align}{width}")


@_with_operators
class VirtualFloat(float, Printed):
    """The value 1.0 of a virtual tensor: prints as `virtual`; a loop whose end depends on it ends in an error."""

    __repr__, __str__, __format__ = Printed.__repr__, Printed.__str__, Printed.__format__

    def __round__(self, ndigits: Any = None) -> Any:
        return self

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Pickle as an ordinary number, which is read without memexplore."""
        return float, (float.__float__(self),)


@_with_operators
class VirtualInt(int, Printed):
    """The value 1 of a virtual tensor: prints as `virtual`, and counts as an int wherever one is needed."""

    __repr__, __str__, __format__ = Printed.__repr__, Printed.__str__, Printed.__format__

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Pickle as an ordinary number, which is read without memexplore."""
        return int, (int.__int__(self),)


class Read:
    """Which virtual numbers the program has read since it began."""

    floats = False


def among(values: Iterable[Any]) -> bool:
    """Return whether there is a virtual float among values.

    A virtual integer is mostly a size, which decides about shapes and not about values.
    """
    return any(type(value) is VirtualFloat for value in values)


def within(data: Any) -> bool:
    """Return whether nested lists have a virtual number."""
    if isinstance(data, list | tuple):
        return any(map(within, data))
    return isinstance(data, VirtualFloat | VirtualInt)


def number(dtype: torch.dtype, value: float = 1) -> Any:
    """Return the Python number that stands for one element of a virtual tensor.

    >>> loss = number(torch.float32)
    >>> print(loss, f"{loss / 3:.4f}", loss > 0)
    virtual virtual True
    """
    if dtype is torch.bool:
        return bool(value)
    if dtype.is_complex:
        return complex(value)
    if dtype.is_floating_point:
        Read.floats = True
        return VirtualFloat(value)
    return VirtualInt(int(value))


def decide_by(value: bool) -> bool:
    """Return a virtual value by which code decides; raise NotSimulated if that makes an endless loop."""
    value_reads.count_test()
    return value
