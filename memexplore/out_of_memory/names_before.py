"""Keep what the names of a notebook meant when a cell began, without keeping its objects alive."""

from __future__ import annotations

import contextlib
import sys
import types
import weakref
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch

_SIMPLE = (int, float, complex, bool, str, bytes, types.NoneType, torch.dtype, torch.device)
"""Types whose values are kept: none of them has memory of a GPU."""
_MOST_BYTES = 4096
"""Of a value that is kept."""


class NamesBefore:
    """What names meant before a cell ran; keeps no object alive but numbers and short texts.

    >>> names = {"count": 1, "rate": 0.1}
    >>> before = NamesBefore(names)
    >>> names |= {"count": 2, "new": 3}
    >>> before.changed(names)
    Changed(restored={'count': 1}, lost=())
    """

    def __init__(self, names: Mapping[str, Any]) -> None:
        self._values = {name: _Kept(value) for name, value in names.items()}

    def changed(self, names: Mapping[str, Any]) -> Changed:
        """Return the values of those names that have another one now."""
        restored, lost = {}, []
        for name, value in names.items():
            before = self._values.get(name)
            if before is not None and not before.is_value(value):
                try:
                    restored[name] = before.value
                except ReferenceError:
                    lost.append(name)
        return Changed(restored, tuple(lost))


class Changed(NamedTuple):
    """The names to which a cell has given another value."""

    restored: dict[str, Any]
    """Those whose value before still exists, with it."""
    lost: tuple[str, ...]


class _Kept:
    """A value as it was: itself where it is simple, else a weak reference."""

    def __init__(self, value: Any) -> None:
        self._is_simple = type(value) in _SIMPLE and sys.getsizeof(value) <= _MOST_BYTES
        self._id = id(value)
        self._value: Any = value if self._is_simple else None
        if not self._is_simple:
            with contextlib.suppress(Exception):
                self._value = weakref.ref(value)

    def is_value(self, value: Any) -> bool:
        """Return whether a value is this one."""
        if self._is_simple:
            return self._value is value or (type(value) is type(self._value) and bool(value == self._value))
        return self._id == id(value)

    @property
    def value(self) -> Any:
        """The value. Raises ReferenceError where it exists no longer."""
        if self._is_simple:
            return self._value
        value = None if self._value is None else self._value()
        if value is None:
            raise ReferenceError
        return value
