"""Kinds of values that knobs have: the default, how a value is checked, and how it is written."""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterable
from typing import Any, Protocol

AS_WRITTEN = "as written"
"""The text of a value that changes nothing."""


class Values(Protocol):
    """The values of a knob."""

    default: Any
    """The value that changes nothing."""
    examples: tuple[Any, ...]
    """Values that change something; all of them where there are few."""

    def parsed(self, name: str, value: Any) -> Any:
        """Return what somebody has given for the knob of a name as one of its values.

        Raises ValueError, with the knob's name and what to write, for anything else.
        """

    def text(self, value: Any) -> str:
        """Return a value as it stands in a setting."""

    def code(self, value: Any) -> str:
        """Return a value as a person writes it in Python."""

    @property
    def listed(self) -> str:
        """The values in Markdown, for the table of all knobs."""


class OneOf:
    """The members of an enum, whose first one changes nothing; their values are the texts that a person may write.

    >>> Answer = enum.Enum("Answer", {"AS_WRITTEN": "as written", "NO": "no"})
    >>> OneOf(Answer).parsed("answer", "no")
    <Answer.NO: 'no'>
    """

    def __init__(self, choices: type[enum.Enum]) -> None:
        self.choices = choices
        self.default, *rest = choices
        self.examples = tuple(rest)

    def parsed(self, name: str, value: Any) -> Any:
        """Return the member that is given, or whose text is."""
        try:
            return self.choices(value)
        except ValueError:
            texts = ", ".join(choice.value for choice in self.choices)
            raise ValueError(f"{name}={value!r} is not a setting; write one of {texts}") from None

    def text(self, value: Any) -> str:
        """Return the text of a member."""
        return str(value.value)

    def code(self, value: Any) -> str:
        """Return the text of a member in quotation marks."""
        return repr(value.value)

    @property
    def listed(self) -> str:
        """The texts of the members that change something."""
        return ", ".join(f"`{choice.value}`" for choice in self.examples)


_MOST = 2**31 - 1
"""Largest number of samples, parts, GPUs or pixels."""


class Number:
    """A positive integer; None changes nothing unless there is another default.

    >>> Number().parsed("batch", 4), Number().parsed("batch", None)
    (4, None)
    """

    def __init__(self, default: int | None = None) -> None:
        self.default = default
        self.examples = (2, 4)

    def parsed(self, name: str, value: Any) -> int | None:
        """Return an integer, also one of numpy or as text, as an int."""
        if value is None and self.default is None:
            return None
        if isinstance(value, str) and value.isdecimal():
            value = int(value)
        number = value.__index__() if hasattr(value, "__index__") and not isinstance(value, bool) else 0
        if number < 1:
            raise ValueError(f"{name}={value!r} is not a positive integer; write 1 or more")
        if number > _MOST:
            raise ValueError(f"{name}={value!r} is more than a step can have; write at most {_MOST}")
        return int(number)

    def text(self, value: Any) -> str:
        """Return the digits."""
        return AS_WRITTEN if value is None else str(value)

    def code(self, value: Any) -> str:
        """Return the digits."""
        return repr(value)

    @property
    def listed(self) -> str:
        """Which numbers."""
        return "a number" if self.default is None else f"a number, {self.default} by default"


class LayerNames:
    """Names of layers, as one name or several; `hint` is added to the sentence about a wrong value.

    >>> LayerNames().parsed("frozen", "encoder.0")
    ('encoder.0',)
    """

    default: tuple[str, ...] = ()
    examples = (("0",),)
    listed = "names of layers"

    def __init__(self, hint: str = "") -> None:
        self._hint = hint

    def parsed(self, name: str, value: Any) -> tuple[str, ...]:
        """Return the names as a tuple."""
        if isinstance(value, str):
            return (value,)
        names = tuple(value) if isinstance(value, Iterable) else (value,)
        if not all(isinstance(layer, str) for layer in names):
            raise ValueError(
                f"{name}={value!r} is not names of layers; write {name}='encoder.0' or a list of names{self._hint}"
            )
        return names

    def text(self, value: Any) -> str:
        """Return the names with spaces between them."""
        return " ".join(value) if value else AS_WRITTEN

    def code(self, value: Any) -> str:
        """Return the names as a tuple in Python."""
        return repr(value)


class Text:
    """A text that a function checks, which raises ValueError for a wrong one; None changes nothing."""

    default: str | None = None

    def __init__(self, example: str, check: Callable[[str], object], listed: str) -> None:
        self.examples = (example,)
        self._check = check
        self.listed = listed

    def parsed(self, name: str, value: Any) -> str | None:
        """Return the text."""
        if value is None:
            return None
        if not isinstance(value, str):
            raise ValueError(f"{name}={value!r} is not a text; write one such as {name}={self.examples[0]!r}")
        self._check(value)
        return value

    def text(self, value: Any) -> str:
        """Return the text itself."""
        return AS_WRITTEN if value is None else str(value)

    def code(self, value: Any) -> str:
        """Return the text in quotation marks."""
        return repr(value)
