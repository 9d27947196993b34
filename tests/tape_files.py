"""Files of tapes taken apart and put together again, as docs/tape.md specifies them, without memexplore's own code."""

from __future__ import annotations

import dataclasses
import json
import zlib
from pathlib import Path
from typing import Any

import numpy as np

from memexplore.tape import Tape

MAGIC = b"memexplore tape 1\n"


@dataclasses.dataclass
class Content:
    """What a file says; everything may be changed before it is packed again."""

    header: dict[str, Any]
    """Without `tables` and `columns`, which follow from the others."""
    tables: Any
    columns: dict[str, np.ndarray[Any, np.dtype[np.int64]]]


def unpacked(data: bytes) -> Content:
    """Return what a file says."""
    end = 22 + int.from_bytes(data[18:22], "little")
    header = json.loads(data[22:end])
    content = zlib.decompress(data[end:])
    at = header.pop("tables")
    tables, columns = json.loads(content[:at]), {}
    for column in header.pop("columns"):
        length, width = column["length"], column["width"]
        planes = np.frombuffer(content, np.uint8, length * width, at).reshape(width, length).astype(np.uint64)
        stored = sum(
            (plane << np.uint64(8 * number) for number, plane in enumerate(planes)), np.zeros(length, np.uint64)
        )
        numbers = [column["lowest"] + column["unit"] * int(number) for number in stored]
        if "first" in column:
            numbers = (np.cumsum(numbers, dtype=object) + column["first"]).tolist() if length else []
        columns[column["name"]] = np.array(numbers, dtype=np.int64)
        at += length * width
    assert at == len(content)
    return Content(header, tables, columns)


def packed(content: Content, level: int = 6, **entries: Any) -> bytes:
    """Return the file that says something, its columns in 8 bytes a number; `entries` replace some of the header."""
    tables = json.dumps(content.tables).encode()
    columns = [{"name": name, "length": len(values), "width": 8} for name, values in content.columns.items()]
    planes = [values.astype("<i8").view(np.uint8).reshape(-1, 8).T.tobytes() for values in content.columns.values()]
    header = json.dumps(content.header | {"tables": len(tables), "columns": columns} | entries).encode()
    return with_header(header, zlib.compress(tables + b"".join(planes), level))


def with_header(header: bytes, stream: bytes) -> bytes:
    """Return the file of a header and a deflated stream."""
    return MAGIC + len(header).to_bytes(4, "little") + header + stream


def content_of(tape: Tape, folder: Path) -> Content:
    """Return what the file of a tape says."""
    path = folder / "of_content.tape"
    tape.save(path)
    return unpacked(path.read_bytes())
