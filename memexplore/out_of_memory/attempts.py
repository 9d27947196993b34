"""Parts of a search that may raise, each of which leaves the others."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

Value = TypeVar("Value")


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
