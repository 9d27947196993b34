"""Parquet files that are no tapes, or damaged or hostile ones: one sentence each, and memory bounded by the file."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest

from memexplore import cli, snapshot
from memexplore.allocator import replay
from memexplore.parquet_file import expanded_size, read_footer
from memexplore.tape import Meta, Source, Tape
from memexplore.tape_file import FIELDS
from memexplore.thrift import read_struct
from tests import sample_tapes

Metadata = dict[str, Any]


def _written(path: Path, table: pyarrow.Table, **options: Any) -> Path:
    file = path / "tape.parquet"
    pyarrow.parquet.write_table(table, file, **options)
    return file


def _table(path: Path) -> pyarrow.Table:
    file = path / "saved.parquet"
    sample_tapes.small_tape().save(file)
    return pyarrow.parquet.read_table(file)


def _with_metadata(path: Path, key: str, change: Callable[[Metadata], object]) -> Path:
    """A saved tape whose JSON object of a key was changed."""
    table = _table(path)
    content = json.loads(table.schema.metadata[key.encode()])
    change(content)
    return _written(path, table.replace_schema_metadata(table.schema.metadata | {key: json.dumps(content)}))


META: dict[str, tuple[Metadata, str]] = {
    "a source that is none": ({"source": "guessed"}, "invalid source: expected one of measured, predicted, imported"),
    "a source that cannot be hashed": ({"source": [[]]}, "not a list"),
    "a device that is a number": ({"device": 7}, "invalid device: expected a text, not 7"),
    "a capacity of half a byte": ({"capacity": 0.5}, "invalid capacity: expected a number of bytes, not 0.5"),
    "a negative total": ({"total": -1}, "invalid total"),
    "settings that nothing reads": ({"settings": "a[" * 10_000}, "invalid settings: 'a' is not an allocator setting"),
    "a release without a number": ({"versions": {"torch": "newest"}}, "'newest' is not a torch release"),
    "a rank below 0": ({"rank": -1}, "invalid rank: expected a number of processes, not -1"),
    "a world that is a text": ({"world": "8"}, "invalid world: expected a number of processes"),
    "a group without processes": ({"communicators": [[0, False]]}, "invalid communicators: expected a group"),
    "groups that are a number": ({"communicators": 8}, "invalid communicators: expected a list of groups, not 8"),
    "notes that are one text": ({"notes": "none"}, "invalid notes: expected a list of texts, not 'none'"),
}


@pytest.mark.parametrize(("changes", "message"), META.values(), ids=META.keys())
def test_metadata_of_a_wrong_kind_is_refused(tmp_path: Path, changes: Metadata, message: str) -> None:
    with pytest.raises(ValueError, match="is not a readable tape") as raised:
        Tape.load(_with_metadata(tmp_path, "memexplore.tape", lambda content: content.update(changes)))
    assert message in str(raised.value)


TABLES: dict[str, tuple[Metadata, str]] = {
    "ops that are numbers": ({"ops": [1, 2]}, "expected a text, not 1"),
    "a frame of two items": ({"frames": [["a.py", 1]]}, "a frame is not a file, a line and a function"),
    "a stack that counts from the end": ({"stacks": [[-1]]}, "a stack refers to a frame that is not in the file"),
    "no modules": ({"modules": None}, "expected a list of texts, not None"),
    "fewer modules than the column uses": ({"modules": []}, "index outside its table"),
}


@pytest.mark.parametrize(("changes", "message"), TABLES.values(), ids=TABLES.keys())
def test_tables_of_a_wrong_kind_are_refused(tmp_path: Path, changes: Metadata, message: str) -> None:
    with pytest.raises(ValueError, match="is not a readable tape") as raised:
        Tape.load(_with_metadata(tmp_path, "memexplore.tables", lambda content: content.update(changes)))
    assert message in str(raised.value)


@pytest.mark.parametrize(
    "text", [b"[" * 100_000, b'{"a":' * 100_000, b"", b"\xff", b'{"source": ' + b"1" * 5000 + b"}", b"null"]
)
def test_metadata_that_is_not_json_is_refused(tmp_path: Path, text: bytes) -> None:
    table = _table(tmp_path)
    file = _written(tmp_path, table.replace_schema_metadata(table.schema.metadata | {b"memexplore.tape": text}))
    with pytest.raises(ValueError, match="its metadata"):
        Tape.load(file)


def test_every_field_of_the_metadata_is_read() -> None:
    assert list(FIELDS) == list(Meta._fields)


def test_fields_of_later_releases_are_ignored(tmp_path: Path) -> None:
    file = _with_metadata(tmp_path, "memexplore.tape", lambda content: content.update(flavour=[1]))
    assert Tape.load(file).equals(sample_tapes.small_tape())


def test_names_are_one_printable_line(tmp_path: Path) -> None:
    file = _with_metadata(
        tmp_path, "memexplore.tables", lambda content: content["modules"].__setitem__(0, "a\x1b[2J\n")
    )
    assert Tape.load(file).modules[0] == "a�[2J�"


COLUMNS: dict[str, tuple[str, Any, str]] = {
    "an action that is none": ("action", np.uint8(11), "column 'action' has the unknown code 11"),
    "a category that is none": ("category", np.uint8(12), "column 'category' has the unknown code 12"),
    "a phase that is none": ("phase", np.uint8(4), "column 'phase' has the unknown code 4"),
    "a negative size": ("size", np.int64(-1), "column 'size' has a value that no tape has"),
    "an address below -1": ("address", np.int64(-2), "column 'address' has a value that no tape has"),
    "an op outside the table": ("op", np.int32(1000), "index outside its table"),
    "a tensor outside the table": ("tensor", np.int32(1000), "index outside its table"),
    "fractions": ("size", np.float64(0.5), "not a column of whole numbers"),
    "another width": ("step", np.int64(0), "it has no column 'step' of int32"),
}


@pytest.mark.parametrize(("name", "value", "message"), COLUMNS.values(), ids=COLUMNS.keys())
def test_a_column_with_a_value_that_no_tape_has_is_refused(tmp_path: Path, name: str, value: Any, message: str) -> None:
    table = _table(tmp_path)
    column = pyarrow.array(np.full(len(table), value))
    changed = table.set_column(table.schema.get_field_index(name), name, column)
    with pytest.raises(ValueError, match="is not a readable tape") as raised:
        Tape.load(_written(tmp_path, changed))
    assert message in str(raised.value)


def test_a_missing_value_is_refused(tmp_path: Path) -> None:
    table = _table(tmp_path)
    column = pyarrow.array(table.column("size").to_numpy(), mask=np.arange(len(table)) == 3)
    with pytest.raises(ValueError, match="column 'size' lacks values"):
        Tape.load(_written(tmp_path, table.set_column(table.schema.get_field_index("size"), "size", column)))


def test_a_table_of_another_program_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="a Parquet file of another program"):
        Tape.load(_written(tmp_path, pyarrow.table({"size": [1, 2]})))


def test_millions_of_equal_rows_in_a_small_file_are_not_read(tmp_path: Path) -> None:
    # By run lengths 23 equal rows take a byte of the file; in memory they take 47 bytes each.
    rows = 2_000_000
    table = _table(tmp_path)
    arrays = [pyarrow.array(np.zeros(rows, column.to_numpy().dtype)) for column in table.columns]
    large = pyarrow.table(arrays, names=table.column_names).replace_schema_metadata(table.schema.metadata)
    file = _written(tmp_path, large, compression="zstd")
    assert file.stat().st_size < 200_000
    with pytest.raises(ValueError, match="it declares 2000000 rows in"):
        Tape.load(file)


def test_a_large_tape_of_equal_rows_is_read(tmp_path: Path) -> None:
    # The time column counts the rows, so it takes about a byte for each.
    file = tmp_path / "tape.parquet"
    Tape.from_columns({"size": np.zeros(1_000_000)}, meta=Meta(Source.MEASURED, "cpu")).save(file)
    assert len(Tape.load(file)) == 1_000_000


def test_pages_that_expand_beyond_the_limit_are_found_before_they_are_read(tmp_path: Path) -> None:
    file = tmp_path / "tape.parquet"
    Tape.from_columns({"size": np.arange(10_000)}, meta=Meta(Source.MEASURED, "cpu")).save(file)
    with open(file, "rb") as opened:
        footer = read_footer(opened, file.stat().st_size)
        # Two columns of 8 bytes that count the rows, and dictionaries of nearly the same size.
        assert 160_000 < expanded_size(opened, footer, 1 << 30) < 400_000
        with pytest.raises(ValueError, match="expand to more"):
            expanded_size(opened, footer, 100_000)


def test_a_required_column_with_statistics_of_an_optional_one_is_refused(tmp_path: Path) -> None:
    # pyarrow 26 ends the process: "Definition level histogram size mismatch".
    file = tmp_path / "tape.parquet"
    sample_tapes.small_tape().save(file)
    data = bytearray(file.read_bytes())
    # The schema element of the column `time`: type INT64 (2), repetition optional (1), name.
    at = data.index(b"\x15\x04\x25\x02\x18\x04time", data.index(b"\x18\x06schema"))
    data[at + 3] = 0  # required
    file.write_bytes(data)
    with pytest.raises(ValueError, match="not a column of whole numbers"):
        Tape.load(file)


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "ends early"),
        (b"\x15", "ends early"),
        (b"\x19\xff\xff\xff\xff\x0f", "ends early"),
        (b"\x1c" * 100, "nested too deeply"),
        (b"\x19" * 100, "nested too deeply"),
        (b"\x15" + b"\xff" * 11, "more than 64 bits"),
        (b"\x1e\x00", "a value of kind 14"),
    ],
)
def test_a_description_that_contradicts_itself_is_refused(data: bytes, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        read_struct(data)


@pytest.mark.parametrize("device", ["cuda:²", "cuda:99999999999", "cuda:-1", "cuda:"])
def test_a_device_without_a_number_is_device_0(tmp_path: Path, device: str) -> None:
    # "²" is a digit of Unicode; as_snapshot makes a list for each device below the number.
    file = _with_metadata(tmp_path, "memexplore.tape", lambda content: content.update(device=device))
    [number] = snapshot.load(file)
    assert number == 0
    assert len(snapshot.as_snapshot(replay(Tape.load(file)))["device_traces"]) == 1


def test_a_tape_without_addresses_is_opened_with_one_sentence(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "tape.parquet"
    Tape.from_columns({"size": [100]}, meta=Meta(Source.MEASURED, "cuda:0")).save(file)
    with pytest.raises(SystemExit):
        cli.main(["open", str(file)])
    [line] = capsys.readouterr().err.splitlines()
    advice = "call memexplore.replay(tape) first, which assigns every address"
    assert line == f"memexplore: {file}: this tape is not placed: {advice}"


def _with_tensor() -> Tape:
    """The small tape, whose weight of 400 bytes is a tensor of 10 by 10 numbers."""
    tape = sample_tapes.small_tape()
    return tape.replace(
        tensor=np.where(np.arange(len(tape)) == 0, 0, -1).astype(np.int32), tensor_texts=("float32[10, 10]",)
    )


def test_tensors_are_kept(tmp_path: Path) -> None:
    _with_tensor().save(tmp_path / "tape.parquet")
    loaded = Tape.load(tmp_path / "tape.parquet")
    assert loaded.equals(_with_tensor())
    assert not loaded.equals(sample_tapes.small_tape())


@pytest.mark.parametrize("rows", [17, 0])
def test_files_of_earlier_releases_have_no_tensors(tmp_path: Path, rows: int) -> None:
    file = tmp_path / "new.parquet"
    _with_tensor()[:rows].save(file)
    table = pyarrow.parquet.read_table(file).drop_columns(["tensor"])
    tables = json.loads(table.schema.metadata[b"memexplore.tables"])
    del tables["tensors"]
    old = _written(
        tmp_path, table.replace_schema_metadata(table.schema.metadata | {"memexplore.tables": json.dumps(tables)})
    )
    assert Tape.load(old).equals(sample_tapes.small_tape()[:rows])


@pytest.mark.parametrize("text", ["<b>", "float32", "float32[3]\n", 3])
def test_a_text_that_is_no_shape_is_refused(tmp_path: Path, text: Any) -> None:
    file = _with_metadata(tmp_path, "memexplore.tables", lambda content: content.update(tensors=[text]))
    with pytest.raises(ValueError, match=r"is not the shape and dtype of a tensor|expected a text"):
        Tape.load(file)


@pytest.mark.parametrize("name", ["size", "stack"])
def test_a_file_without_another_column_is_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(ValueError, match="of another program"):
        Tape.load(_written(tmp_path, _table(tmp_path).drop_columns([name])))
