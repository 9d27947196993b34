"""Files of tapes that are damaged, changed or hostile, each made from a number."""

from __future__ import annotations

import copy
import functools
import json
import random
import tempfile
import zlib
from pathlib import Path
from typing import Any

import numpy as np

from tests import sample_tapes
from tests.fuzz.snapshots import SCALARS, damage, place_in
from tests.tape_files import Content, content_of, packed, with_header

_NUMBERS = (0, 1, -1, 3, 4, 9, 11, 255, 256, 1 << 31, 1 << 32, 1 << 62, -(1 << 63), (1 << 63) - 1)
_LONGEST = 1_000_000
_JSON_SCALARS = [scalar for scalar in SCALARS if type(scalar) is not bytes]


@functools.cache
def contents() -> tuple[Content, ...]:
    """Return what the files of tapes say that can be read."""
    tapes = (sample_tapes.small_tape(), sample_tapes.oom_tape(), sample_tapes.training_tape(2, 1, 16, 1))
    with tempfile.TemporaryDirectory() as folder:
        return tuple(content_of(tape, Path(folder)) for tape in tapes)


@functools.cache
def files() -> tuple[bytes, ...]:
    """Return the files that are damaged, deflated or not."""
    return tuple(packed(content, level) for content in contents() for level in (6, 0))


def damaged(number: int) -> bytes:
    """Return a file with some bytes changed, removed, repeated or taken from another one."""
    rng = random.Random(number)
    data = bytearray(rng.choice(files()))
    damage(data, rng, b'{}[]",:0\x00\xff\x80', files())
    return bytes(data)


def in_the_stream(number: int) -> bytes:
    """Return a file whose stream is whole, and what it expands to is damaged, cut or long."""
    rng = random.Random(number)
    data = rng.choice(files())
    end = 22 + int.from_bytes(data[18:22], "little")
    content = bytearray(zlib.decompress(data[end:]))
    if rng.random() < 0.1:
        content += bytes(rng.choice((1, 1000, 1 << 24)))
    elif rng.random() < 0.1:
        del content[rng.randrange(len(content)) :]
    else:
        # The tables, which are text, are easily no JSON any more.
        begin = json.loads(data[22:end])["tables"] if rng.random() < 0.8 else 0
        for _ in range(rng.choice((1, 1, 2, 4, 30))):
            content[rng.randrange(begin, len(content))] = rng.choice((rng.randrange(256), 0, 0xFF, 1, 0x80))
    return data[:end] + zlib.compress(bytes(content), rng.choice((1, 6, 0)))


def changed(number: int) -> bytes:
    """Return a file whose header, tables or columns were changed."""
    rng = random.Random(number)
    content = copy.deepcopy(rng.choice(contents()[:2]) if rng.randrange(20) else contents()[2])
    for _ in range(rng.choice((0, 0, 1, 2))):
        holder, name = place_in(rng.choice((content.header, content.tables)), rng)
        if holder is not None:
            value = rng.choice(_JSON_SCALARS)
            holder[name] = rng.choice((value, value, [value], {"a": value}, copy.deepcopy(content.header)))
    for _ in range(rng.choice((0, 1, 1, 2, 5))):
        _change_column(content, rng)
    data = packed(content, rng.choice((6, 0)))
    return _with_changed_header(data, rng) if rng.random() < 0.3 else data


def _change_column(content: Content, rng: random.Random) -> None:
    """Change the numbers of a column, its length, or drop it."""
    name = rng.choice(list(content.columns) or ["time"])
    values = content.columns.get(name, np.zeros(0, np.int64))
    match rng.randrange(8):
        case 0:
            content.columns.pop(name, None)
        case 1:
            content.columns[name] = np.resize(values, min(len(values) * rng.choice((0, 2, 30, 100_000)), _LONGEST))
        case 2:
            content.columns[name] = values[rng.randrange(len(values) + 1) :]
        case 3:
            content.columns[name] = rng.choice(list(content.columns.values()) or [values])
        case 4 if len(values):
            content.columns[name] = values[rng.sample(range(len(values)), len(values))]
        case _ if len(values):
            content.columns[name] = values.copy()
            content.columns[name][rng.randrange(len(values))] = rng.choice((*_NUMBERS, *values[:20].tolist()))


def _with_changed_header(data: bytes, rng: random.Random) -> bytes:
    """Return a file whose header, the description of columns included, was changed."""
    end = 22 + int.from_bytes(data[18:22], "little")
    if rng.random() < 0.2:
        texts = (b"", b"[" * 50_000, b"null", b"\xff", b"1" * 5000, b'{"a":' * 5000, b"NaN")
        return with_header(rng.choice(texts), data[end:])
    header: Any = json.loads(data[22:end])
    holder, name = place_in(header, rng)
    if rng.random() < 0.5 and header.get("columns"):
        holder, name = rng.choice(header["columns"]), rng.choice(("name", "length", "width", "lowest", "unit", "first"))
    if holder is not None:
        holder[name] = rng.choice((*_NUMBERS, *_JSON_SCALARS, [], {}))
    return with_header(json.dumps(header).encode(), data[end:])


def make(number: int) -> bytes:
    """Return the file of a number: damaged, damaged in its stream, or changed."""
    return (damaged, in_the_stream, changed)[number % 3](number)
