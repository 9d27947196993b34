"""Make numpy arrays that stand for unknown values: every element is 1, and prints as `virtual`.

Everything computed from such an array by numpy alone is virtual too; a library that converts it to a plain array gets
ones.
"""

from __future__ import annotations

from typing import Any

import numpy

from memexplore.virtual_gpu.values.virtual_numbers import Printed


class _VirtualBytes(bytes):
    """The bytes of an array of stand-ins."""


class Pickled:
    """How many arrays of stand-ins were pickled in this process."""

    arrays = 0


class VirtualArray(numpy.ndarray[Any, Any]):
    """A numpy array of stand-ins for unknown values.

    It has the names of a plain array only: numpy takes what has a `filled` for a masked array, for example.

    >>> losses = stand_ins(numpy.ones(3, numpy.float32))
    >>> print(losses, losses.mean(), float(losses.mean()))
    virtual(shape=(3,), dtype=float32) virtual 1.0
    """

    def __array_wrap__(self, array: Any, context: Any = None, return_scalar: bool = False) -> Any:
        if return_scalar or not array.shape:
            return _scalar(array[()])
        return super().__array_wrap__(array, context, return_scalar)

    def __array_function__(self, function: Any, types: Any, args: Any, kwargs: Any) -> Any:
        return _marked(super().__array_function__(function, types, args, kwargs))

    # They make their scalar without `__array_wrap__`.
    def mean(self, *args: Any, **kwargs: Any) -> Any:  # noqa: D102
        return _marked(super().mean(*args, **kwargs))

    def std(self, *args: Any, **kwargs: Any) -> Any:  # noqa: D102
        return _marked(super().std(*args, **kwargs))

    def var(self, *args: Any, **kwargs: Any) -> Any:  # noqa: D102
        return _marked(super().var(*args, **kwargs))

    def tobytes(self, *args: Any, **kwargs: Any) -> bytes:  # noqa: D102
        return _VirtualBytes(super().tobytes(*args, **kwargs))

    def tofile(self, fid: Any, sep: str = "", format: str = "%s") -> None:  # noqa: D102
        if sep:
            super().tofile(fid, sep, format)
        elif hasattr(fid, "write"):
            fid.write(self.tobytes())
        else:
            with open(fid, "wb") as file:
                file.write(self.tobytes())

    def __reduce_ex__(self, protocol: Any) -> Any:
        Pickled.arrays += 1
        return super().__reduce_ex__(protocol)

    def __getitem__(self, index: Any) -> Any:
        result = super().__getitem__(index)
        return result if isinstance(result, numpy.ndarray) else _scalar(result)

    def __iter__(self) -> Any:
        return (self[number] for number in range(len(self)))

    def __repr__(self) -> str:
        return f"virtual(shape={self.shape}, dtype={self.dtype})"

    __str__ = __repr__

    def __format__(self, spec: str) -> str:
        return repr(self) if self.shape else format(self[()], spec)


def is_of_stand_ins(data: Any) -> bool:
    """Whether the memory of an object that has the buffer protocol is that of an array of stand-ins.

    >>> array = stand_ins(numpy.ones(3, numpy.float32))
    >>> is_of_stand_ins(array.tobytes()), is_of_stand_ins(memoryview(array)[1:]), is_of_stand_ins(b"ones")
    (True, True, False)
    """
    owner = data.obj if isinstance(data, memoryview) else data
    return isinstance(owner, (_VirtualBytes, VirtualArray))


def stand_ins(array: numpy.ndarray[Any, Any]) -> VirtualArray:
    """Return an array, which nothing else writes to, as one of stand-ins."""
    return array.view(VirtualArray)


def _marked(result: Any) -> Any:
    """Return a result of numpy, arrays in a tuple or list too, as stand-ins."""
    if type(result) is numpy.ndarray:
        return result.view(VirtualArray)
    if isinstance(result, list | tuple):
        return type(result)(map(_marked, result)) if type(result) in (list, tuple) else result
    return _scalar(result)


_repr, _format = Printed.__repr__, Printed.__format__


class _Float(numpy.float64):
    """A numpy number that stands for an unknown value; `item()` and arithmetic give plain numbers."""

    __repr__, __str__, __format__ = _repr, _repr, _format


class _Int(numpy.int64):
    """As `_Float`, for integers."""

    __repr__, __str__, __format__ = _repr, _repr, _format


def _scalar(value: Any) -> Any:
    """Return a number of numpy as one that prints as `virtual`; booleans and complex numbers stay what they are."""
    if isinstance(value, numpy.floating):
        return _Float(value)
    return _Int(value) if isinstance(value, numpy.integer) else value
