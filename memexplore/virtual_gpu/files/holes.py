"""Leave holes in files where a program writes unknown values: a file of any size takes no disk space for them.

`tensor.cpu().numpy()` of unknown values is an array of stand-ins. A program that writes it in a format of its own
(`tobytes`, `tofile`, `file.write(array)`) gets a file of the right size, which reads as zeros there.
"""

from __future__ import annotations

import io
import os
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from memexplore.virtual_gpu.values.virtual_array import is_of_stand_ins

_LEAST = 2**20
"""Bytes of the smallest hole: less is written as it is."""

if TYPE_CHECKING:
    _Buffered = io.BufferedWriter
else:
    _Buffered = object


class _WithHoles(_Buffered):
    """A buffered binary file that is written."""

    on_unknown: Callable[[], object]

    def write(self, data: Any) -> int:
        """Write the data, or a hole of its size for unknown values; return the number of bytes."""
        if not is_of_stand_ins(data):
            return super().write(data)
        self.on_unknown()
        size = memoryview(data).nbytes
        if size < _LEAST:
            return super().write(data)
        self.flush()
        end = self.seek(size, os.SEEK_CUR)
        if end > os.fstat(self.fileno()).st_size:
            self.truncate(end)
        return size


class _Writer(_WithHoles, io.BufferedWriter):
    pass


class _ReaderAndWriter(_WithHoles, io.BufferedRandom):  # type: ignore[misc]
    pass


_KINDS: dict[type, type[Any]] = {io.BufferedWriter: _Writer, io.BufferedRandom: _ReaderAndWriter}


def with_holes(file: Any, on_unknown: Callable[[], object]) -> Any:
    """Return a file that `open` returned as one with holes, if it is a buffered binary file.

    `on_unknown` is called each time that unknown values are written.
    """
    kind = _KINDS.get(type(file))
    if kind is None:
        return file
    hollow = kind(file.detach())
    hollow.on_unknown = on_unknown
    return hollow


__all__ = ["with_holes"]
