"""Parquet tapes that are damaged, changed or hostile: a number goes in, the bytes of a file come out."""

from __future__ import annotations

import copy
import functools
import io
import json
import random
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow
import pyarrow.parquet

from memexplore.tape import COLUMNS, Tape
from tests import sample_tapes
from tests.fuzz.snapshots import SCALARS, damage, place_in

_COMPRESSIONS = ("zstd", "none", "snappy")


@functools.cache
def tables() -> tuple[pyarrow.Table, ...]:
    """Return the tables of tapes that can be read."""
    tapes = (sample_tapes.small_tape(), sample_tapes.oom_tape(), sample_tapes.training_tape(2, 1, 16, 1))
    return tuple(_table(tape) for tape in tapes)


def _table(tape: Tape) -> pyarrow.Table:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "tape.parquet"
        tape.save(path)
        return pyarrow.parquet.read_table(path)


@functools.cache
def files() -> tuple[bytes, ...]:
    """Return the files that are damaged, each in several compressions."""
    return tuple(_file(table, compression) for table in tables() for compression in _COMPRESSIONS)


def _file(table: pyarrow.Table, compression: str = "zstd", **options: Any) -> bytes:
    file = io.BytesIO()
    pyarrow.parquet.write_table(table, file, compression=compression, **options)
    return file.getvalue()


def damaged(number: int) -> bytes:
    """Return a file with some bytes changed, removed, repeated or taken from another one."""
    rng = random.Random(number)
    data = bytearray(rng.choice(files()))
    damage(data, rng, b"\x15\x1c\x2c\x00\xff\x80", files())
    if rng.random() < 0.5:
        data[:4] = data[-4:] = b"PAR1"
    return bytes(data)


def in_the_footer(number: int) -> bytes:
    """Return a file whose description of columns and pages has some changed bytes."""
    rng = random.Random(number)
    data = bytearray(rng.choice(files()))
    length = int.from_bytes(data[-8:-4], "little")
    for _ in range(rng.choice((1, 1, 2, 4))):
        # The metadata of the table, which is text, is a third of it and lies at the end.
        at = len(data) - 8 - length + rng.randrange(length if rng.random() < 0.2 else 2 * length // 3)
        data[at] = rng.choice((rng.randrange(256), data[at] ^ 1 << rng.randrange(8), 0, 0xFF))
    return bytes(data)


def changed(number: int) -> bytes:
    """Return a file whose metadata or columns were changed."""
    rng = random.Random(number)
    table = rng.choice(tables()[:2]) if rng.randrange(20) else tables()[2]
    metadata = dict(table.schema.metadata)
    for _ in range(rng.choice((0, 1, 1, 2))):
        key = rng.choice((b"memexplore.tape", b"memexplore.tables"))
        if rng.random() < 0.1:
            metadata[key] = rng.choice((b"", b"[" * 50_000, b"null", b"\xff", b"1" * 5000, b'{"a":' * 5000, b"NaN"))
            continue
        try:
            content = json.loads(metadata[key])
        except (ValueError, RecursionError):
            continue
        holder, name = place_in(content, rng)
        if holder is None:
            continue
        value = rng.choice([scalar for scalar in SCALARS if type(scalar) is not bytes])
        holder[name] = rng.choice((value, value, [value], {"a": value}, copy.deepcopy(content)))
        metadata[key] = json.dumps(content).encode()
    for _ in range(rng.choice((0, 0, 1, 2))):
        table = _changed_column(table, rng)
    options = {"use_dictionary": rng.random() < 0.5, "data_page_version": rng.choice(("1.0", "2.0"))}
    if rng.random() < 0.2:
        options["row_group_size"] = rng.choice((len(table) // 3 + 1, 1000))
    return _file(table.replace_schema_metadata(metadata), rng.choice(_COMPRESSIONS), **options)


def _changed_column(table: pyarrow.Table, rng: random.Random) -> pyarrow.Table:
    """Return a table with one column of other values, another type, twice or not at all."""
    name = rng.choice(list(COLUMNS))
    at = table.schema.get_field_index(name)
    if at < 0 or not len(table) or table.column(name).null_count:
        return table
    values = table.column(name).to_numpy().copy()
    if values.dtype != COLUMNS[name]:  # changed before
        return table
    match rng.randrange(7):
        case 0:
            return table.drop_columns([name])
        case 1:
            return table.append_column(name, table.column(name))
        case 2:
            other = rng.choice((np.float64, np.int16, np.uint64, np.dtype("U5"), bool))
            return table.set_column(at, name, pyarrow.array(values.astype(other)))
        case 3:
            nulls = np.arange(len(values)) == rng.randrange(len(values))
            return table.set_column(at, name, pyarrow.array(values, mask=nulls))
        case 4:
            return table.set_column(at, name, pyarrow.array([[each] for each in values.tolist()]))
        case 5:
            count = len(values) * rng.choice((0, 1, 30))
            return table.take(pyarrow.array(np.arange(count) % len(values)))
        case _:
            limits = np.iinfo(values.dtype)
            chosen = [
                value
                for value in (0, 1, -1, 3, 4, 9, 11, 255, 1 << 31, 1 << 62, limits.min, limits.max)
                if limits.min <= value <= limits.max
            ]
            values[rng.randrange(len(values))] = rng.choice(chosen)
            return table.set_column(at, name, pyarrow.array(values))


def make(number: int) -> bytes:
    """Return the file of a number: damaged, damaged in its footer, or changed."""
    return (damaged, in_the_footer, changed)[number % 3](number)
