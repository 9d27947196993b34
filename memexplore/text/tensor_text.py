"""Write a tensor's shape and dtype as text, such as `float32[8, 1024]`, and read it back."""

from __future__ import annotations

import functools
import re
from collections.abc import Iterable
from typing import Any, TypeVar

_TEXT = re.compile(r"[a-z][a-z0-9_]*\[([0-9]{1,19}(, [0-9]{1,19})*)?\]\Z")
_Value = TypeVar("_Value")


# The same shapes repeat in every step.
@functools.lru_cache(maxsize=20_000)
def tensor_text(shape: tuple[int, ...], dtype: Any) -> str:
    """Return a shape and a dtype, a `torch.dtype` or its name, as one text.

    >>> tensor_text((8, 1024), "torch.float32"), tensor_text((), "int64")
    ('float32[8, 1024]', 'int64[]')
    """
    return f"{str(dtype).removeprefix('torch.')}[{', '.join(map(str, shape))}]"


def is_tensor_text(text: str) -> bool:
    """Return whether a text has the form that `tensor_text` gives it."""
    return _TEXT.match(text) is not None


def shape_of(text: str) -> tuple[int, ...] | None:
    """Return the shape in a text of `tensor_text`; None for the empty text.

    >>> shape_of("float32[8, 1024]"), shape_of("int64[]"), shape_of("")
    ((8, 1024), (), None)
    """
    if not text:
        return None
    numbers = text.partition("[")[2].rstrip("]")
    return tuple(map(int, numbers.split(", "))) if numbers else ()


def dtype_of(text: str) -> str:
    """Return the name of the dtype in a text of `tensor_text`; empty for the empty text.

    >>> dtype_of("bfloat16[8, 1024]")
    'bfloat16'
    """
    return text.partition("[")[0]


def interned(values: Iterable[_Value | None]) -> tuple[list[int], tuple[_Value, ...]]:
    """Return the index of each value in a table, and the table in the order of first use; -1 for None and empty ones.

    >>> interned(["int64[]", "", "float32[2]", "int64[]"])
    ([0, -1, 1, 0], ('int64[]', 'float32[2]'))
    """
    table: dict[_Value, int] = {}
    numbers = [table.setdefault(value, len(table)) if value else -1 for value in values]
    return numbers, tuple(table)
