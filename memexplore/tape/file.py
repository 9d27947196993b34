"""Files of tapes (`.tape`): a header with the peaks, then the tape in deflated columns; docs/tape.md specifies them.

A file that is read may come from anybody, so nothing of it is believed: what it declares is bounded by its length
before memory is taken, every code and index must be one of the tape's, and every text and number has its type.
"""

from __future__ import annotations

import itertools
import json
import os
import zlib
from collections.abc import Mapping, Sequence
from typing import Any, BinaryIO, NamedTuple

import numpy as np

from memexplore.tape.blocks import AS_DIFFERENCES, LATER_COLUMNS, ROW_COLUMNS, to_blocks, to_rows
from memexplore.tape.columns import Column, Numbers, column_of, decode, encode
from memexplore.tape.fields import (
    check_columns,
    json_of,
    meta_as_json,
    meta_of,
    object_of,
    tensor_text_of,
    texts_of,
    whole_number_of,
    workspaces_of,
)
from memexplore.tape.methods import method
from memexplore.tape.parquet import is_parquet, read_parquet, write_parquet
from memexplore.tape.peaks import Peaks, peaks_of
from memexplore.tape.tape import Frame, Meta, Tape
from memexplore.text.result_files import PARQUET, TAPE, tape_kind
from memexplore.text.untrusted import clean_text, shown

MAGIC = TAPE.starts[0] + b"1\n"
_START = len(MAGIC) + 4
"""Bytes in front of the header: the magic and the length of the header."""
_LEVEL = 6
"""Of deflate; 9 takes up to ten times as long for 0.5 %."""
_ROWS, _ROWS_PER_BYTE = 100_000, 8  # a tape of GPUs has about one row a byte, because of its clock
_BYTES, _BYTES_PER_BYTE = 4 << 20, 32  # columns of tapes deflate to a sixth
_STACK_COLUMNS = ("stack.frames", "stack.frame", "frame.file", "frame.function")


class Header(NamedTuple):
    """What stands in front of the columns of a file."""

    rows: int
    meta: Meta
    peaks: Peaks | None
    """None for a tape that is not placed."""


def save(tape: Tape, path: str) -> None:
    """Write a tape to a file: a Parquet file if the path ends in `.parquet`, else one as docs/tape.md specifies."""
    if tape_kind(path) is PARQUET:
        write_parquet(tape, path)
        return
    data = to_bytes(tape)
    with open(path, "wb") as file:
        file.write(data)


def load(path: str) -> Tape:
    """Return the tape in a file that `save` or `to_parquet` wrote.

    Raises ValueError with one sentence for any other file, OSError for a file that cannot be opened.
    """
    if is_parquet(path):
        return read_parquet(path)
    with open(path, "rb") as file:
        try:
            return _read(file, os.path.getsize(path))
        except (ValueError, OverflowError) as error:
            raise _unreadable(path, error) from error


def read_header(path: str) -> Header:
    """Return the header of a file of a tape, without reading more of it; raises as `load` does."""
    with open(path, "rb") as file:
        try:
            values = _header(file, os.path.getsize(path))
            peaks = values.get("peaks")
            return Header(
                whole_number_of(values.get("rows"), "the number of rows"),
                meta_of(values.get("meta")),
                None if peaks is None else peaks_of(peaks),
            )
        except ValueError as error:
            raise _unreadable(path, error) from error


def to_bytes(tape: Tape) -> bytes:
    """Return the content of the file of a tape."""
    peaks: Peaks | None = method("peaks")(tape)
    block_bytes = np.zeros(len(tape), dtype=np.int64) if peaks is None else method("block_bytes")(tape)
    tables, stacks = _tables(tape)
    text = _json(tables)
    columns = to_blocks(tape, block_bytes) | stacks
    encoded = [encode(name, values, differences=name in AS_DIFFERENCES) for name, values in columns.items()]
    header = {
        "rows": len(tape),
        "meta": meta_as_json(tape.meta),
        "peaks": None if peaks is None else peaks.as_json(),
        "tables": len(text),
        "columns": [column.as_json() for column, _ in encoded],
    }
    start = _json(header)
    start = MAGIC + len(start).to_bytes(4, "little") + start
    content = b"".join([text, *(data for _, data in encoded)])
    packed = zlib.compress(content, _LEVEL)
    if not _is_plausible(len(tape), len(content), len(start) + len(packed)):
        # A reader refuses a tape that is much longer than its file, as one of equal rows can be.
        packed = zlib.compress(content, 0)
    return start + packed


def _json(value: Any) -> bytes:
    return json.dumps(value, separators=(",", ":")).encode()


def _is_plausible(rows: int, content: int, length: int) -> bool:
    """Return whether a file of some bytes may hold so many rows, and so many bytes of tables and columns."""
    return rows <= _ROWS + _ROWS_PER_BYTE * length and content <= _BYTES + _BYTES_PER_BYTE * length


def _header(file: BinaryIO, length: int) -> dict[str, Any]:
    """Return the JSON object in front of the columns."""
    start = file.read(_START)
    if start[: len(MAGIC)] != MAGIC:
        is_later = start.startswith(TAPE.starts[0])
        raise ValueError("a later memexplore wrote it" if is_later else "it does not begin as a tape does")
    size = int.from_bytes(start[len(MAGIC) :], "little")
    if len(start) < _START or size > length - _START:
        raise ValueError("it ends early")
    return object_of(json_of(file.read(size)), "the entries of its header")


def _read(file: BinaryIO, length: int) -> Tape:
    header = _header(file, length)
    rows = whole_number_of(header.get("rows"), "the number of rows")
    table_bytes = whole_number_of(header.get("tables"), "the length of its tables")
    described = header.get("columns")
    if type(described) is not list:
        raise ValueError(f"its columns are described by {shown(described)}")
    columns = [column_of(value) for value in described]
    content_bytes = table_bytes + sum(column.bytes for column in columns)
    if not _is_plausible(rows, content_bytes, length):
        raise ValueError(f"it declares {rows} rows and {content_bytes} bytes of columns in {length} bytes")
    if any(column.length > rows for column in columns if column.name in ROW_COLUMNS):
        raise ValueError("a column is longer than the tape")
    content = memoryview(_inflated(file.read(), content_bytes))
    table_values = object_of(json_of(bytes(content[:table_bytes])), "its tables")
    numbers = _numbers(columns, content[table_bytes:])
    tables: dict[str, Sequence[Any]] = {
        "ops": texts_of(table_values.get("ops")),
        "modules": texts_of(table_values.get("modules")),
        "stacks": _stacks(table_values, numbers),
        "tensor_texts": texts_of(table_values.get("tensors"), tensor_text_of),
        "workspaces": workspaces_of(table_values.get("workspaces", [])),
    }
    lengths = dict(zip(("op", "module", "stack", "tensor", "workspace"), map(len, tables.values()), strict=True))
    values = to_rows(numbers, rows, lengths)
    check_columns(values)
    return Tape.from_columns(
        values, meta=meta_of(header.get("meta")), classes=texts_of(table_values.get("classes")), **tables
    )


def _inflated(data: bytes, length: int) -> bytes:
    """Return the bytes that a deflate stream of just this length expands to."""
    stream = zlib.decompressobj()
    try:
        content = stream.decompress(data, length + 1)
    except zlib.error:
        raise ValueError("its columns are damaged") from None
    if len(content) != length or not stream.eof or stream.unused_data:
        raise ValueError("its columns have another length than it declares")
    return content


def _numbers(columns: Sequence[Column], data: memoryview) -> dict[str, Numbers]:
    """Return the numbers of the columns that a tape needs; a later release may write others."""
    numbers = {}
    ends = itertools.accumulate(column.bytes for column in columns)
    for column, end in zip(columns, ends, strict=True):
        if column.name in (*ROW_COLUMNS, *_STACK_COLUMNS):
            numbers[column.name] = decode(column, data[end - column.bytes : end])
    for name in (*ROW_COLUMNS, *_STACK_COLUMNS):
        if name not in numbers and name not in LATER_COLUMNS:
            raise ValueError(f"it has no column {name!r}")
    return numbers


def _tables(tape: Tape) -> tuple[dict[str, Sequence[Any]], dict[str, Numbers]]:
    """Return the tables of a tape, and the columns of its stacks: files repeat in frames, and frames in stacks."""
    frames: dict[Frame, int] = {}
    frame_of_stack = [frames.setdefault(frame, len(frames)) for stack in tape.stacks for frame in stack]
    files: dict[str, int] = {}
    functions: dict[str, int] = {}
    numbers: dict[str, list[int]] = {
        "stack.frames": [len(stack) for stack in tape.stacks],
        "stack.frame": frame_of_stack,
        "frame.file": [files.setdefault(frame.filename, len(files)) for frame in frames],
        "frame.function": [functions.setdefault(frame.function, len(functions)) for frame in frames],
    }
    tables: dict[str, Sequence[Any]] = {
        "ops": tape.ops,
        "modules": tape.modules,
        "classes": tape.classes,
        "tensors": tape.tensor_texts,
        "files": list(files),
        "functions": list(functions),
        "lines": [frame.line for frame in frames],  # no column, as C++ frames have lines of more than 63 bits
    }
    if tape.workspaces:
        tables["workspaces"] = tape.workspaces
    return tables, {name: np.array(values, dtype=np.int64) for name, values in numbers.items()}


def _stacks(tables: Mapping[str, Any], numbers: Mapping[str, Numbers]) -> list[tuple[Frame, ...]]:
    """Return the stacks from their tables and columns."""
    files, functions, lines = texts_of(tables.get("files")), texts_of(tables.get("functions")), tables.get("lines")
    counts, frame_of_stack, file_of_frame, function_of_frame = (numbers[name].tolist() for name in _STACK_COLUMNS)
    if type(lines) is not list or not all(type(line) is int for line in lines):
        raise ValueError("the lines of its frames are not whole numbers")
    if not len(lines) == len(file_of_frame) == len(function_of_frame):
        raise ValueError("its frames lack a file, a line or a function")
    if min(counts, default=0) < 0 or sum(counts) != len(frame_of_stack):
        raise ValueError("its stacks have another number of frames than it declares")
    ends = ((frame_of_stack, lines), (file_of_frame, files), (function_of_frame, functions))
    if any(indices and not 0 <= min(indices) <= max(indices) < len(table) for indices, table in ends):
        raise ValueError("a stack refers to a frame that is not in the file")
    frames = [
        Frame(files[file], line, functions[function])
        for file, line, function in zip(file_of_frame, lines, function_of_frame, strict=True)
    ]
    frames_of_stacks = iter(frame_of_stack)
    return [tuple(frames[number] for number in itertools.islice(frames_of_stacks, count)) for count in counts]


def _unreadable(path: str, error: Exception) -> ValueError:
    text = clean_text(" ".join(str(error).split()), 300).rstrip(".")
    return ValueError(f"{path} is not a readable tape ({text}); give a file that Tape.save wrote")
