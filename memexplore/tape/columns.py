"""Columns of whole numbers in few bytes: counted from the lowest, by their common unit, as narrow as they can be.

Bytes of equal weight stand side by side (*byte planes*), in which deflate finds repeats that whole numbers hide. The
specification for other readers is docs/tape.md.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from memexplore.text.untrusted import shown

Numbers = NDArray[np.int64]

_WIDTHS = (1, 2, 4, 8)
_MASK = (1 << 64) - 1


class Column(NamedTuple):
    """How the numbers of a column are written: each is `lowest + unit * stored`, modulo 2^64."""

    name: str
    length: int
    """How many numbers the column has."""
    width: int
    """Bytes of a stored number: 1, 2, 4 or 8."""
    lowest: int = 0
    unit: int = 1
    first: int | None = None
    """None for plain numbers. Else the numbers are differences, and their running sum begins at `first`."""

    @property
    def bytes(self) -> int:
        """How many bytes the column has."""
        return self.length * self.width

    def as_json(self) -> dict[str, Any]:
        """Return the object that stands for the column in the header of a file."""
        return {name: value for name, value in self._asdict().items() if value is not None}


def column_of(value: Any) -> Column:
    """Return the column that an object of a header describes.

    >>> column_of({"name": "time", "length": 3, "width": 2, "first": 7, "unit": 1000})
    Column(name='time', length=3, width=2, lowest=0, unit=1000, first=7)

    Raises ValueError for anything else.
    """
    if type(value) is not dict or type(value.get("name")) is not str:
        raise ValueError(f"a column is described by {shown(value)}")
    numbers = {name: value[name] for name in Column._fields[1:] if name in value}
    if not all(type(number) is int and -1 << 63 <= number < 1 << 63 for number in numbers.values()):
        raise ValueError(f"column {shown(value['name'])} is described by something else than whole numbers")
    if not {"length", "width"} <= numbers.keys() or numbers["length"] < 0 or numbers["width"] not in _WIDTHS:
        raise ValueError(f"column {shown(value['name'])} has no length, or no width of 1, 2, 4 or 8 bytes")
    return Column(value["name"], **numbers)


def encode(name: str, values: NDArray[Any], *, differences: bool = False) -> tuple[Column, bytes]:
    """Return how a column of whole numbers is written, and its bytes; as differences where neighbours are close.

    >>> encode("time", np.array([7000, 8000, 9000]), differences=True)
    (Column(name='time', length=3, width=1, lowest=0, unit=1000, first=7000), b'\\x00\\x01\\x01')
    """
    numbers = np.asarray(values, dtype=np.int64)
    if not len(numbers):
        return Column(name, 0, 1, first=0 if differences else None), b""
    first = int(numbers[0]) if differences else None
    if differences:
        numbers = np.diff(numbers, prepend=numbers[0])
    lowest = int(numbers.min())
    stored = numbers.view(np.uint64) - np.uint64(lowest & _MASK)
    unit = int(np.gcd.reduce(stored)) or 1
    if unit >= 1 << 63:  # JSON of other programs has signed numbers
        unit = 1
    stored //= np.uint64(unit)
    width = next(width for width in _WIDTHS if int(stored.max()) < 1 << 8 * width)
    planes = stored.astype(f"<u{width}").view(np.uint8).reshape(-1, width).T
    return Column(name, len(numbers), width, lowest, unit, first), np.ascontiguousarray(planes).tobytes()


def decode(column: Column, data: memoryview) -> Numbers:
    """Return the numbers of a column from its bytes.

    >>> decode(Column("time", 3, 1, unit=1000, first=7000), memoryview(b"\\x00\\x01\\x01")).tolist()
    [7000, 8000, 9000]
    """
    planes = np.frombuffer(data, np.uint8).reshape(column.width, column.length)
    stored = np.ascontiguousarray(planes.T).view(f"<u{column.width}").reshape(-1).astype(np.uint64)
    stored *= np.uint64(column.unit & _MASK)
    stored += np.uint64(column.lowest & _MASK)
    if column.first is not None:
        stored = np.cumsum(stored) + np.uint64(column.first & _MASK)
    return stored.view(np.int64)
