"""What a Parquet file of flat columns declares, read before pyarrow: a file goes in, a checked `Footer` comes out.

pyarrow believes a file: it ends the process over a footer that contradicts itself, and allocates the 2 GiB that a page
of a few bytes declares. The structs are those of parquet.thrift.
"""

from __future__ import annotations

from typing import Any, BinaryIO, NamedTuple

from memexplore.thrift import Struct, read_struct

_MAGIC = b"PAR1"
_LONGEST_HEADER = 1 << 16
_OPTIONAL = 1
_NUMBERS = {1: "INT32", 2: "INT64"}


class Chunk(NamedTuple):
    """The pages of one column in one group of rows, as positions in the file."""

    begin: int
    end: int


class Footer(NamedTuple):
    """The checked description of a file whose columns are whole numbers."""

    rows: int
    columns: tuple[str, ...]
    chunks: tuple[Chunk, ...]
    """Of all columns and groups of rows."""
    metadata: dict[bytes, bytes]
    writer: str


def read_footer(file: BinaryIO, length: int) -> Footer:
    """Return the description at the end of a file of `length` bytes.

    Raises ValueError if the file is no Parquet file, contradicts itself or has other columns than whole numbers.
    """
    file.seek(max(length - 8, 0))
    end = file.read(8)
    size = int.from_bytes(end[:4], "little")
    if end[4:] != _MAGIC or size > length - 12:
        raise ValueError("it is not a Parquet file, or ends early")
    file.seek(length - 8 - size)
    fields, _ = read_struct(file.read(size))
    names = _column_names(_list(fields, 2))
    groups = _list(fields, 4)
    rows = _whole(fields, 3)
    if sum(_whole(group, 3) for group in groups) != rows or len(groups) > 1 + rows // 1000:
        raise ValueError(f"it declares {len(groups)} groups of rows for {rows} rows")
    chunks = [chunk for group in groups for chunk in _chunks(group, names, length)]
    return Footer(
        rows,
        tuple(names),
        tuple(chunks),
        {_bytes(pair, 1): _bytes(pair, 2) for pair in _list(fields, 5, [])},
        _bytes(fields, 6).decode("latin-1"),
    )


def expanded_size(file: BinaryIO, footer: Footer, limit: int) -> int:
    """Return the bytes of all pages of a file after decompression, as the pages declare them.

    Raises ValueError if a page is damaged, or if the sum exceeds `limit`.
    """
    total = 0
    for chunk in footer.chunks:
        position = chunk.begin
        while position < chunk.end:
            file.seek(position)
            header, size = read_struct(file.read(min(_LONGEST_HEADER, chunk.end - position)))
            position += size + _whole(header, 3)
            # A page without content counts for its header, so that overlapping chunks of them have an end.
            total += max(_whole(header, 2), size)
            if total > limit:
                raise ValueError("its pages expand to more than a tape of its rows needs")
    return total


def _column_names(schema: list[Any]) -> list[str]:
    names = []
    if not schema or _whole(schema[0], 5) != len(schema) - 1:
        raise ValueError("it has nested columns")
    for element in schema[1:]:
        name = _bytes(element, 4).decode("utf-8", "replace")
        if _whole(element, 1) not in _NUMBERS or _whole(element, 3) != _OPTIONAL or 5 in element:
            raise ValueError("it has a column that is not a column of whole numbers")
        names.append(name)
    return names


def _chunks(group: Struct, names: list[str], length: int) -> list[Chunk]:
    columns = _list(group, 1)
    rows = _whole(group, 3)
    if len(columns) != len(names):
        raise ValueError("a group of rows lacks columns")
    chunks = []
    for name, column in zip(names, columns, strict=True):
        if not isinstance(column, dict) or not column.keys() <= {2, 3, 4, 5, 6, 7}:
            raise ValueError("a column is encrypted or lies in another file")
        meta = column.get(3)
        if not isinstance(meta, dict) or _list(meta, 3) != [name.encode()] or _whole(meta, 5) != rows:
            raise ValueError("a group of rows has other columns than the file")
        histograms = meta.get(16, {})
        if not isinstance(histograms, dict) or len(_list(histograms, 2, [])) > 1:
            raise ValueError("a column has statistics of nested values")
        if len(_list(histograms, 3, [])) not in (0, 2):
            raise ValueError("a column has statistics of nested values")
        # As Arrow finds the first page of a chunk.
        begin, dictionary = _whole(meta, 9), _whole(meta, 11, 0)
        if 0 < dictionary < begin:
            begin = dictionary
        chunk = Chunk(begin, begin + _whole(meta, 7))
        if chunk.end > length:
            raise ValueError("a column lies outside the file")
        chunks.append(chunk)
    return chunks


def _whole(struct: Any, field: int, missing: int | None = None) -> int:
    value = struct.get(field, missing) if isinstance(struct, dict) else None
    if type(value) is not int or value < 0:
        raise ValueError("its description of columns or pages lacks a number")
    return value


def _bytes(struct: Any, field: int) -> bytes:
    value = struct.get(field) if isinstance(struct, dict) else None
    if type(value) is not bytes:
        raise ValueError("its description of columns lacks a text")
    return value


def _list(struct: Any, field: int, missing: list[Any] | None = None) -> list[Any]:
    value = struct.get(field, missing) if isinstance(struct, dict) else None
    if type(value) is not list:
        raise ValueError("its description of columns lacks a list")
    return value
