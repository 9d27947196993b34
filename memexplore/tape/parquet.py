"""Parquet files of tapes for DuckDB, Dask and Spark: a row an event, tables and metadata in the file's metadata.

They are written and read with pyarrow, where it is installed. pyarrow believes a file: open only files of people that
you trust, or files as `Tape.save` writes them.
"""

from __future__ import annotations

import json
from typing import Any

import numpy as np
from numpy.typing import NDArray

from memexplore.tape.fields import (
    check_columns,
    json_of,
    meta_as_json,
    meta_of,
    object_of,
    tensor_text_of,
    texts_of,
    workspaces_of,
)
from memexplore.tape.tape import COLUMNS, Frame, Tape
from memexplore.text.result_files import PARQUET, require_pyarrow
from memexplore.text.untrusted import clean_text

_META, _TABLES = b"memexplore.tape", b"memexplore.tables"
_LATER_COLUMNS = ("tensor", "workspace")
"""Columns that files of earlier releases lack."""


def is_parquet(path: str) -> bool:
    """Return whether a file begins as Parquet files do; OSError where it cannot be read."""
    with open(path, "rb") as file:
        return file.read(len(PARQUET.starts[0])) == PARQUET.starts[0]


def write_parquet(tape: Tape, path: str) -> None:
    """Write a tape to a Parquet file. Raises ImportError where pyarrow is not installed."""
    require_pyarrow()
    import pyarrow
    import pyarrow.parquet

    # Files repeat in every stack, so frames are stored once and stacks point at them.
    frames: dict[Frame, int] = {}
    stacks = [[frames.setdefault(frame, len(frames)) for frame in stack] for stack in tape.stacks]
    tables = {
        "ops": tape.ops,
        "modules": tape.modules,
        "frames": list(frames),
        "stacks": stacks,
        "classes": tape.classes,
        "tensors": tape.tensor_texts,
        "workspaces": tape.workspaces,
    }
    table = pyarrow.table({name: getattr(tape, name) for name in COLUMNS})
    table = table.replace_schema_metadata({_META: json.dumps(meta_as_json(tape.meta)), _TABLES: json.dumps(tables)})
    pyarrow.parquet.write_table(table, path, compression="zstd")


def read_parquet(path: str) -> Tape:
    """Return the tape in a Parquet file that `write_parquet` or an earlier release wrote.

    Raises ValueError with one sentence for any other file, and where pyarrow is not installed.
    """
    try:
        require_pyarrow()
    except ImportError as error:
        raise ValueError(f"{path} cannot be read: {error}") from None
    import pyarrow
    import pyarrow.parquet

    try:
        with pyarrow.parquet.ParquetFile(path) as file:
            metadata = file.schema_arrow.metadata or {}
            if not {_META, _TABLES} <= metadata.keys():
                raise ValueError("another program wrote it")
            meta = meta_of(json_of(metadata[_META]))
            tables = object_of(json_of(metadata[_TABLES]), "its tables")
            columns = _columns(file)
        return Tape.from_columns(
            columns,
            meta=meta,
            ops=texts_of(tables.get("ops")),
            modules=texts_of(tables.get("modules")),
            stacks=_stacks(tables.get("frames"), tables.get("stacks")),
            classes=texts_of(tables.get("classes", [])),  # files of earlier releases have none
            tensor_texts=texts_of(tables.get("tensors", []), tensor_text_of),
            workspaces=workspaces_of(tables.get("workspaces", [])),
        )
    except (ValueError, pyarrow.ArrowException, OSError, OverflowError) as error:
        text = clean_text(" ".join(str(error).split()), 300).rstrip(".")
        raise ValueError(f"{path} is not a readable tape ({text}); give a file that Tape.save wrote") from error


def _columns(file: Any) -> dict[str, NDArray[Any]]:
    """Return the columns of a tape after checking types, codes and ranges."""
    import pyarrow

    schema = file.schema_arrow
    names = [name for name in COLUMNS if name not in _LATER_COLUMNS or name in schema.names]
    for name in names:
        fields = schema.get_all_field_indices(name)
        if len(fields) != 1 or schema.field(fields[0]).type != pyarrow.from_numpy_dtype(COLUMNS[name]):
            raise ValueError(f"it has no column {name!r} of {np.dtype(COLUMNS[name])}")
    table = file.read(columns=names)
    if any(table.column(name).null_count for name in names):
        raise ValueError("a column lacks values")
    columns = {name: table.column(name).to_numpy() for name in names}
    check_columns(columns)
    return columns


def _stacks(frames: Any, stacks: Any) -> list[tuple[Frame, ...]]:
    """Return the stacks from the table of frames and the lists of numbers in it."""
    if type(frames) is not list or type(stacks) is not list:
        raise ValueError("its frames and stacks are not lists")
    table = [Frame(*frame) for frame in frames]
    return [tuple(table[number] for number in stack) for stack in stacks]
