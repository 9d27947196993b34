"""Content of a message to the browser, packed: JSON text in one binary buffer, float arrays in another."""

from __future__ import annotations

import gzip
import json
from typing import Any

import numpy as np

COMPRESS_FROM = 1 << 15
"""Bytes of text from which it is compressed: decompressing a shorter text takes longer than sending it."""


def pack(content: dict[str, Any]) -> list[bytes]:
    """Return two buffers: the content as JSON, and its float64 arrays one after the other.

    The JSON holds ``{"offset": ..., "length": ...}`` in place of an array, both counted in numbers of eight bytes.
    Arrays of other types become lists in the JSON. Unpacked by ``frontend/unpacking.js``.

    >>> text, numbers = pack({"x": np.array([1.0, 2.0]), "rows": np.array([3])})
    >>> text, len(numbers)
    (b'{"x": {"offset": 0, "length": 2}, "rows": [3]}', 16)
    """
    arrays: list[np.ndarray[Any, Any]] = []
    count = 0

    def reference(value: Any) -> Any:
        nonlocal count
        array = np.ascontiguousarray(value)
        if array.dtype != np.float64:
            return array.tolist()
        arrays.append(array)
        count += array.size
        return {"offset": count - array.size, "length": array.size}

    text = json.dumps(content, default=reference).encode()
    if len(text) > COMPRESS_FROM:
        text = gzip.compress(text, compresslevel=1)
    return [text, b"".join(array.tobytes() for array in arrays)]
