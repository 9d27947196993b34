"""Python numbers that stand for unknown values: they count as 1 and print as `virtual`.

In: a dtype. Out: a number. A test that depends on it is counted, so that a loop whose end depends on it ends in an
error (value_loops.py).
"""

from __future__ import annotations

import dis
import re
import sys
from collections.abc import Iterable
from typing import Any

import torch

from memexplore.virtual_gpu.tensors import value_loops

_SUBSCRIPT = dis.opmap["BINARY_SUBSCR"]
"""The instruction ``container[key]``, below which a dictionary compares keys."""


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
        return float, (float(self),)


@_with_operators
class VirtualInt(int, Printed):
    """The value 1 of a virtual tensor: prints as `virtual`, and counts as an int wherever one is needed."""

    __repr__, __str__, __format__ = Printed.__repr__, Printed.__str__, Printed.__format__

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Pickle as an ordinary number, which is read without memexplore."""
        return int, (int(self),)


class VirtualChoice(VirtualInt):
    """An index that was chosen among many, such as a token: equal to no number that the program names.

    As the key in ``dictionary[token]`` it counts as 1, because every token of a vocabulary is in its dictionary.
    """

    def __eq__(self, other: object) -> bool:
        frame = sys._getframe(1)
        if frame.f_code.co_code[frame.f_lasti] == _SUBSCRIPT:
            return int(self) == other
        return decide_by(self is other)

    def __ne__(self, other: object) -> bool:
        return decide_by(self is not other)

    __hash__ = int.__hash__


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


def number(dtype: torch.dtype, value: float = 1, choices: int = 0) -> Any:
    """Return the Python number that stands for one element of a virtual tensor.

    `choices` is the number of candidates from which it was chosen, 0 for a number that is no index.

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
    return VirtualChoice(int(value)) if choices > 2 else VirtualInt(int(value))


def decide_by(value: bool) -> bool:
    """Return a virtual value by which code decides; raise NotSimulated if that makes an endless loop."""
    value_loops.count_read()
    return value
