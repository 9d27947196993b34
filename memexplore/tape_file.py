"""Parquet files of tapes: a Tape goes in, a file comes out, and back.

A file that is read may come from anybody, so nothing of it is believed: its rows and pages are bounded by its length
before they are read, every code and index must be one of the tape's, and every text and number of the metadata has its
type.
"""

from __future__ import annotations

import enum
import json
import os
import re
from collections.abc import Callable
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray

from memexplore.allocator.settings import Settings
from memexplore.parquet_file import Footer, expanded_size, read_footer
from memexplore.tape import COLUMNS, Action, Category, Communicator, Ending, Frame, Meta, Os, Phase, Source, Tape
from memexplore.tensor_text import is_tensor_text
from memexplore.texts import clean_text, shown

_ROWS_PER_BYTE = 4  # a tape has less than one, because its time column grows
_ROWS = 100_000
_BYTES_PER_ROW = 80  # the columns have 51
_BYTES = 32 << 20
_LARGEST = 1 << 62
_PROCESSES = 1 << 31
_LATER_COLUMNS = ("tensor",)
"""Columns that files of earlier releases lack."""
_WRITER = "parquet-cpp-arrow version "
_CODES: dict[str, type[enum.IntEnum]] = {"action": Action, "category": Category, "phase": Phase}
_RELEASE = re.compile(r"[0-9]{1,4}\.[0-9]{1,4}(?![0-9])")


def write_tape(tape: Tape, path: str) -> None:
    """Write a tape to a Parquet file; tables and metadata go into the metadata of the file."""
    import pyarrow
    import pyarrow.parquet

    # Files repeat in every stack, so frames are stored once and stacks point at them.
    frames: dict[Frame, int] = {}
    stacks = [[frames.setdefault(frame, len(frames)) for frame in stack] for stack in tape.stacks]
    tables = {"ops": tape.ops, "modules": tape.modules, "frames": list(frames), "stacks": stacks}
    tables |= {"classes": tape.classes} if tape.classes else {}
    tables |= {"tensors": tape.tensor_texts}
    meta = tape.meta._asdict() | {"versions": dict(tape.meta.versions)}
    table = pyarrow.table({name: getattr(tape, name) for name in COLUMNS})
    table = table.replace_schema_metadata(
        {"memexplore.tape": json.dumps(meta), "memexplore.tables": json.dumps(tables)}
    )
    pyarrow.parquet.write_table(table, path, compression="zstd")


def read_tape(path: str) -> Tape:
    """Return the tape in a file that `Tape.save` wrote.

    Raises ValueError with one sentence for any other file, OSError for a file that cannot be opened.
    """
    import pyarrow

    length = os.path.getsize(path)
    with open(path, "rb") as file:
        try:
            footer = read_footer(file, length)
            _check_size(footer, file, length)
            if not {b"memexplore.tape", b"memexplore.tables"} <= footer.metadata.keys():
                raise ValueError("it is a Parquet file of another program")
            meta = _meta(_json(footer.metadata[b"memexplore.tape"]))
            tables = _object(_json(footer.metadata[b"memexplore.tables"]), "its tables")
            return Tape.from_columns(
                _columns(file, footer),
                meta=meta,
                ops=_texts(tables.get("ops")),
                modules=_texts(tables.get("modules")),
                stacks=_stacks(tables.get("frames"), tables.get("stacks")),
                classes=_texts(tables.get("classes", [])),  # files of earlier releases have none
                tensor_texts=_texts(tables.get("tensors", []), _tensor_text),
            )
        except (ValueError, pyarrow.ArrowException, OSError, OverflowError) as error:
            text = clean_text(" ".join(str(error).split()), 300).rstrip(".")
            raise ValueError(f"{path} is not a readable tape ({text}); give a file that Tape.save wrote") from error


def _check_size(footer: Footer, file: BinaryIO, length: int) -> None:
    """Refuse a file of another program, and one that expands to more than a tape of its length can hold."""
    earlier = tuple(name for name in COLUMNS if name not in _LATER_COLUMNS)
    if not footer.writer.startswith(_WRITER) or footer.columns not in (tuple(COLUMNS), earlier):
        raise ValueError("it is a Parquet file of another program")
    if footer.rows > _ROWS_PER_BYTE * length + _ROWS:
        raise ValueError(f"it declares {footer.rows} rows in {length} bytes")
    if footer.rows:  # of an empty tape no page is read
        expanded_size(file, footer, _BYTES_PER_ROW * footer.rows + _BYTES)


def _columns(file: BinaryIO, footer: Footer) -> dict[str, NDArray[Any]]:
    """Return the columns of a tape after checking types, codes and ranges."""
    import pyarrow
    import pyarrow.parquet

    dtypes = {name: COLUMNS[name] for name in footer.columns}
    if not footer.rows:
        return {name: np.empty(0, dtype=dtype) for name, dtype in dtypes.items()}
    file.seek(0)
    with pyarrow.parquet.ParquetFile(file, pre_buffer=False) as parquet:
        schema = parquet.schema_arrow
        for name, dtype in dtypes.items():
            fields = schema.get_all_field_indices(name)
            if len(fields) != 1 or schema.field(fields[0]).type != pyarrow.from_numpy_dtype(dtype):
                raise ValueError(f"it has no column {name!r} of {np.dtype(dtype)}")
        table = parquet.read(columns=list(dtypes), use_threads=False)
    if table.num_rows != footer.rows:
        raise ValueError("it has fewer rows than it declares")
    columns = {}
    for name in dtypes:
        column = table.column(name)
        if column.null_count:
            raise ValueError(f"column {name!r} lacks values")
        columns[name] = column.to_numpy()
    for name, codes in _CODES.items():
        if columns[name].max() >= len(codes):
            raise ValueError(f"column {name!r} has the unknown code {columns[name].max()}")
    for name, lowest in (("address", -1), ("size", 0), ("step", 0), ("time", 0)):
        column = columns[name]
        if not lowest <= column.min() <= column.max() <= _LARGEST:
            raise ValueError(f"column {name!r} has a value that no tape has")
    return columns


def _json(data: bytes) -> Any:
    try:
        return json.loads(data)
    except RecursionError:
        raise ValueError("its metadata is nested too deeply") from None
    except ValueError:  # numbers of more than 4300 digits among them
        raise ValueError("its metadata is not JSON") from None


def _object(value: Any, name: str) -> dict[str, Any]:
    if type(value) is not dict:
        raise ValueError(f"{name} are not a JSON object but {shown(value)}")
    return value


def _meta(value: Any) -> Meta:
    """Return metadata from its JSON object; files of earlier releases lack some fields."""
    values = _object(value, "its metadata")
    if "source" not in values or "device" not in values:
        raise ValueError("its metadata lacks the source or the device")
    checked = {}
    for name, given in values.items():
        if name in FIELDS:  # a later release may write others
            try:
                checked[name] = FIELDS[name](given)
            except ValueError as error:
                raise ValueError(f"its metadata has an invalid {name}: {error}") from None
    return Meta(**checked)


def _text(value: Any) -> str:
    if type(value) is not str:
        raise ValueError(f"expected a text, not {shown(value)}")
    return clean_text(value)


def _tensor_text(value: Any) -> str:
    text = _text(value)
    if not is_tensor_text(text):
        raise ValueError(f"{shown(text)} is not the shape and dtype of a tensor")
    return text


def _lines(value: Any) -> str:
    """Return a text of several lines, as messages of errors are."""
    if type(value) is not str:
        raise ValueError(f"expected a text, not {shown(value)}")
    return "\n".join(clean_text(line) for line in value.split("\n"))


def _texts(value: Any, read: Callable[[Any], str] = _text) -> tuple[str, ...]:
    if type(value) is not list:
        raise ValueError(f"expected a list of texts, not {shown(value)}")
    return tuple(read(each) for each in value)


def _text_or_none(value: Any) -> str | None:
    return None if value is None else _text(value)


def _bytes_or_none(value: Any) -> int | None:
    if value is not None and (type(value) is not int or not 0 <= value < _LARGEST):
        raise ValueError(f"expected a number of bytes, not {shown(value)}")
    return value


def _settings(value: Any) -> str:
    Settings.parse(_text(value))
    return _text(value)


def _versions(value: Any) -> dict[str, str]:
    versions = {_text(name): _text(version) for name, version in _object(value, "versions").items()}
    if "torch" in versions and not _RELEASE.match(versions["torch"]):
        raise ValueError(f"{shown(versions['torch'])} is not a torch release")
    return versions


def _member(kind: type[enum.StrEnum]) -> Callable[[Any], enum.StrEnum]:
    def read(value: Any) -> enum.StrEnum:
        if type(value) is not str or value not in {member.value for member in kind}:
            raise ValueError(f"expected one of {', '.join(kind)}, not {shown(value)}")
        return kind(value)

    return read


def _number_or_none(value: Any, lowest: int) -> int | None:
    if value is not None and (type(value) is not int or not lowest <= value < _PROCESSES):
        raise ValueError(f"expected a number of processes, not {shown(value)}")
    return value


def _communicators(value: Any) -> tuple[Communicator, ...]:
    if type(value) is not list:
        raise ValueError(f"expected a list of groups, not {shown(value)}")
    for each in value:
        if type(each) is not list or [type(part) for part in each] != [int, bool] or not 0 < each[0] < _PROCESSES:
            raise ValueError(f"expected a group, not {shown(each)}")
    return tuple(Communicator(*each) for each in value)


FIELDS: dict[str, Callable[[Any], Any]] = {
    "source": _member(Source),
    "device": _text,
    "gpu": _text_or_none,
    "capacity": _bytes_or_none,
    "total": _bytes_or_none,
    "settings": _settings,
    "versions": _versions,
    "notes": lambda value: _texts(value, _lines),
    "ending": _member(Ending),
    "error": _lines,
    "trained_on_cpu": lambda value: _texts(value, _lines),
    "advice": _lines,
    "unmeasured": _lines,
    "os": _member(Os),
    "rank": lambda value: _number_or_none(value, 0),
    "world": lambda value: _number_or_none(value, 1),
    "communicators": _communicators,
    "late_reserved": _bytes_or_none,
    "early_allocated": _bytes_or_none,
    "early_reserved": _bytes_or_none,
    "limit": _bytes_or_none,
    "capacity_without_limit": _bytes_or_none,
}


def _stacks(frames: Any, stacks: Any) -> list[tuple[Frame, ...]]:
    """Return the stacks from the table of frames and the lists of numbers in it."""
    if type(frames) is not list or type(stacks) is not list:
        raise ValueError("its frames and stacks are not lists")
    table = [_frame(frame) for frame in frames]
    result = []
    for stack in stacks:
        if type(stack) is not list or not all(type(number) is int and 0 <= number < len(table) for number in stack):
            raise ValueError("a stack refers to a frame that is not in the file")
        result.append(tuple(table[number] for number in stack))
    return result


def _frame(value: Any) -> Frame:
    if type(value) is not list or len(value) != 3 or type(value[1]) is not int:
        raise ValueError("a frame is not a file, a line and a function")
    return Frame(_text(value[0]), value[1], _text(value[2]))
