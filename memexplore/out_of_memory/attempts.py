"""Reads of objects of the user, whose classes may raise anything, as a proxy does outside of its context."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

Value = TypeVar("Value")


def is_readable(value: object) -> bool:
    """Return whether a value says its class, as `isinstance` needs.

    >>> class Proxy:
    ...     @property
    ...     def __class__(self):
    ...         raise RuntimeError("there is no request")
    >>> is_readable(Proxy()), is_readable(1)
    (False, True)
    """
    try:
        value.__class__  # noqa: B018
    except Exception:
        return False
    return True


def one_line(error: BaseException) -> str:
    """Return the class of an error and the first line of its text, the class alone where the text cannot be read.

    >>> one_line(ValueError("wrong"))
    'ValueError: wrong'
    """
    try:
        return f"{type(error).__name__}: {error}".splitlines()[0]
    except Exception:
        return type(error).__name__


class Attempts:
    """Calls of functions that may raise.

    >>> attempts = Attempts()
    >>> attempts.value(lambda: 1 // 0, -1), attempts.value(lambda: 1, -1), attempts.error
    (-1, 1, 'ZeroDivisionError: integer division or modulo by zero')
    """

    def __init__(self) -> None:
        self.error = ""
        """The first error, in one line."""

    def value(self, function: Callable[[], Value], otherwise: Value) -> Value:
        """Return the value of a function, `otherwise` if it raises."""
        try:
            return function()
        except Exception as error:
            self.error = self.error or one_line(error)
            return otherwise
