"""Files of tapes: what is kept, what a page reads, and files that are no tapes, damaged or hostile."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import memexplore as mx
from memexplore import cli, snapshot
from memexplore.allocator import replay
from memexplore.hardware.outside_allocator import Communicator
from memexplore.tape import COLUMNS, Action, Category, Ending, Frame, Meta, Os, Phase, Source, Tape
from memexplore.tape.fields import FIELDS
from memexplore.tape.file import read_header
from memexplore.tape.peaks import StepPeaks
from tests import sample_tapes
from tests.data import kept
from tests.documents import REPOSITORY
from tests.needs import need
from tests.tape_files import MAGIC, Content, content_of, packed, with_header

TABLES = ("ops", "modules", "stacks", "classes", "tensor_texts", "workspaces", "meta")


def assert_same(tape: Tape, other: Tape) -> None:
    """Every column, table and field of the metadata is equal, and columns have their types."""
    for name, dtype in COLUMNS.items():
        assert getattr(other, name).dtype == dtype
        np.testing.assert_array_equal(getattr(tape, name), getattr(other, name), name)
    for name in TABLES:
        assert getattr(tape, name) == getattr(other, name), name


def saved(tape: Tape, folder: Path) -> Path:
    path = folder / "saved.tape"
    tape.save(path)
    return path


# -- what is kept


RECORDINGS = sorted(path.name.removesuffix(".json.gz") for path in kept.RECORDINGS.glob("*.json.gz"))


@pytest.mark.parametrize(
    "tape",
    [
        sample_tapes.small_tape(),
        sample_tapes.small_tape()[:0],
        sample_tapes.oom_tape(),
        sample_tapes.training_tape(2, 1, 16, 1),
        sample_tapes.big_tape(20_000),
    ],
    ids=["small", "no rows", "out of memory", "training", "random"],
)
def test_a_saved_tape_is_loaded_again(tape: Tape, tmp_path: Path) -> None:
    assert_same(tape, Tape.load(saved(tape, tmp_path)))


@pytest.mark.parametrize("name", RECORDINGS)
def test_recordings_are_kept(name: str, tmp_path: Path) -> None:
    for device in kept.devices(name):
        tape = kept.tape(name, device)
        assert_same(tape, Tape.load(saved(tape, tmp_path)))


EVERYTHING = Meta(
    Source.MEASURED,
    "cuda:1",
    gpu="T4",
    capacity=1 << 34,
    total=1 << 35,
    settings="expandable_segments:True",
    versions={"torch": "2.13.0+cu128", "memexplore": "0.1.0"},
    notes=("a note", "another\nof two lines"),
    ending=Ending.ERROR,
    error="ValueError: too small (train.py:12)",
    trained_on_cpu=("Net",),
    advice="Write .to('cuda').",
    unmeasured="A child process.",
    os=Os.WSL,
    rank=3,
    world=8,
    communicators=(Communicator(8, False), Communicator(2, True)),
    late_reserved=1,
    early_allocated=2,
    early_reserved=3,
    limit=4,
    capacity_without_limit=5,
)


def test_every_field_of_the_metadata_and_every_table_is_kept(tmp_path: Path) -> None:
    assert all(value != Meta._field_defaults.get(name) for name, value in EVERYTHING._asdict().items())
    assert list(FIELDS) == list(Meta._fields)
    tape = Tape.from_columns(
        {"address": [0], "size": [40], "op": [0], "module": [0], "stack": [1], "tensor": [0], "workspace": [1]},
        meta=EVERYTHING,
        ops=["aten::mm", "unused"],
        modules=["fc"],
        classes=["Linear"],
        # Frames of C++ have lines of 64 bits.
        stacks=[(), (Frame("a.cpp", (1 << 64) - 1, "f"), Frame("train.py", 7, "step")), (), (Frame("a.cpp", 0, "f"),)],
        tensor_texts=["float32[10]"],
        workspaces=[(0,), (1 << 62, 0, 512)],
    )
    assert_same(tape, Tape.load(saved(tape, tmp_path)))


_ROW = st.tuples(
    st.sampled_from(list(Action)),
    st.sampled_from([-1, 0, 512, 1024, 1 << 62]),
    st.integers(0, 1 << 62),
    st.sampled_from([0, -1, 1 << 63, 7, -(1 << 63)]).map(lambda stream: stream if stream < 1 << 63 else -1),
    st.sampled_from(list(Category)),
    st.sampled_from(list(Phase)),
    st.integers(0, 3) | st.integers(0, (1 << 31) - 1),
    *[st.integers(-1, 1)] * 5,
    st.integers(0, 5000) | st.integers(0, 1 << 62),
)
_FRAMES = ((Frame("train.py", 1, "f"),), (Frame("train.py", 2, "f"), Frame("train.py", 1, "f")))


@settings(max_examples=200, deadline=None)
@given(st.lists(_ROW, max_size=30))
def test_any_rows_are_kept(tmp_path_factory: pytest.TempPathFactory, rows: list[tuple[Any, ...]]) -> None:
    names = ("action", "address", "size", "stream", "category", "phase", "step", "op", "module", "stack", "tensor")
    columns = dict(zip((*names, "workspace", "time"), zip(*rows, strict=True), strict=True)) if rows else {}
    tables: dict[str, Any] = {"tensor_texts": ("int64[]", "int64[2]"), "workspaces": ((512, 0), (0,))}
    tape = Tape.from_columns(columns, meta=EVERYTHING, ops="ab", modules="ab", stacks=_FRAMES, **tables)
    assert_same(tape, Tape.load(saved(tape, tmp_path_factory.getbasetemp())))


def test_a_large_tape_of_equal_rows_is_read(tmp_path: Path) -> None:
    # Deflated, its million rows would take a few kB, and a reader refuses such a file.
    tape = Tape.from_columns({"size": np.zeros(1_000_000)}, meta=Meta(Source.MEASURED, "cpu"))
    assert len(Tape.load(saved(tape, tmp_path))) == 1_000_000


def test_a_file_is_small(tmp_path: Path) -> None:
    tape = sample_tapes.training_tape(3)
    assert saved(tape, tmp_path).stat().st_size < 20 * len(tape)  # 55 bytes a row in memory, and the tables


# -- the header


def test_the_header_has_the_peaks(tmp_path: Path) -> None:
    header = read_header(str(saved(sample_tapes.small_tape(), tmp_path)))
    assert (header.rows, header.meta) == (15, sample_tapes.small_tape().meta)
    peaks = header.peaks
    assert peaks is not None
    # Comments in `small_tape` give the bytes after each row; the weight is allocated in step 0.
    assert (peaks.allocated, peaks.reserved, peaks.row) == (750, 750, 4)
    assert peaks.by_category == {"parameter": 400, "input": 100, "activation": 200, "temporary": 50}
    assert peaks.by_layer == {"fc": 600, "(no layer)": 100, "Net": 50}
    assert peaks.steps == (StepPeaks(0, 400, 400, 400, 400), StepPeaks(1, 750, 750, 720, 720))


def test_a_tape_without_addresses_has_no_peaks(tmp_path: Path) -> None:
    path = saved(Tape.from_columns({"size": [100]}, meta=Meta(Source.MEASURED, "cuda:0")), tmp_path)
    assert read_header(str(path)).peaks is None
    assert len(Tape.load(path)) == 1


def test_the_header_is_read_without_the_columns(tmp_path: Path) -> None:
    path = saved(sample_tapes.small_tape(), tmp_path)
    data = path.read_bytes()
    path.write_bytes(data[: 22 + int.from_bytes(data[18:22], "little")])
    assert read_header(str(path)).rows == 15
    with pytest.raises(ValueError, match="not a readable tape"):
        Tape.load(path)


@pytest.mark.parametrize(
    "peaks",
    [7, {}, {"allocated": -1}, {"allocated": "x"}, {"by_category": [1]}, {"steps": {"step": [1]}}, {"row": 0.5}],
)
def test_peaks_of_a_wrong_kind_are_refused(tmp_path: Path, peaks: Any) -> None:
    content = content_of(sample_tapes.small_tape(), tmp_path)
    content.header["peaks"] = content.header["peaks"] | peaks if peaks and isinstance(peaks, dict) else peaks
    path = tmp_path / "changed.tape"
    path.write_bytes(packed(content))
    with pytest.raises(ValueError, match="not a readable tape"):
        read_header(str(path))
    assert_same(Tape.load(path), sample_tapes.small_tape())  # which computes its peaks itself


# -- a reader in another language


def test_the_reader_in_the_docs_reads_a_tape(tmp_path: Path) -> None:
    node = shutil.which("node")
    need(node is not None, "node is not installed: install nodejs 18 or newer")
    assert node is not None
    code = re.search(r"```js\n(.*?)```", (REPOSITORY / "docs" / "tape.md").read_text(), re.DOTALL)
    assert code is not None
    (tmp_path / "reader.mjs").write_text(code[1])
    (tmp_path / "main.mjs").write_text(
        'import { readFileSync } from "node:fs";\nimport { readTape } from "./reader.mjs";\n'
        "const { header, tables, columns } = await readTape(new Uint8Array(readFileSync(process.argv[2])));\n"
        "const numbers = Object.fromEntries(Object.entries(columns).map(([name, values]) => [name, [...values]]));\n"
        "console.log(JSON.stringify({ header, tables, columns: numbers }));\n"
    )
    tape = sample_tapes.training_tape(2, 1, 16, 1)
    path = saved(tape, tmp_path)
    done = subprocess.run([node, "main.mjs", str(path)], cwd=tmp_path, capture_output=True, text=True, check=True)
    read = json.loads(done.stdout)
    columns = read["columns"]
    assert read["header"]["rows"] == len(tape)
    assert read["tables"]["modules"] == list(tape.modules)
    assert columns["time"] == tape.time.tolist()
    born = np.flatnonzero(np.isin(tape.action, [Action.ALLOC, Action.PREEXISTING]))
    assert columns["block.born"] == born.tolist()
    kinds = np.array(columns["kind.size"], dtype=int)
    assert kinds[np.array(columns["block.kind"], dtype=int)].tolist() == tape.size[born].tolist()
    places = np.array([-1, *columns["place.address"]], dtype=int)
    assert places[np.array(columns["block.place"], dtype=int)].tolist() == tape.address[born].tolist()
    freed = np.array(columns["block.life"], dtype=int) > 0
    assert int(freed.sum()) == int(np.count_nonzero(tape.action == Action.FREE_REQUESTED))


# -- files that are damaged or hostile


def _changed(folder: Path, change: Callable[[Content], object]) -> Path:
    """The saved small tape, of which something was changed."""
    content = content_of(_with_tensor(), folder)
    change(content)
    path = folder / "changed.tape"
    path.write_bytes(packed(content))
    return path


def _with_tensor() -> Tape:
    """The small tape, whose weight of 400 bytes is a tensor of 10 by 10 numbers, maybe with a workspace behind it."""
    tape = sample_tapes.small_tape()
    first = np.where(np.arange(len(tape)) == 0, 0, -1).astype(np.int32)
    return tape.replace(tensor=first, tensor_texts=("float32[10, 10]",), workspace=first, workspaces=((0, 512),))


def _refused(path: Path, message: str) -> None:
    with pytest.raises(ValueError, match="is not a readable tape") as raised:
        Tape.load(path)
    assert message in str(raised.value)
    assert str(raised.value).isprintable()


META: dict[str, tuple[dict[str, Any], str]] = {
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
def test_metadata_of_a_wrong_kind_is_refused(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    _refused(_changed(tmp_path, lambda content: content.header["meta"].update(changes)), message)


TABLE_CHANGES: dict[str, tuple[dict[str, Any], str]] = {
    "ops that are numbers": ({"ops": [1, 2]}, "expected a text, not 1"),
    "no modules": ({"modules": None}, "expected a list of texts, not None"),
    "fewer modules than the rows use": ({"modules": []}, "column 'kind.module' has a number outside its table"),
    "a shape that is none": ({"tensors": ["<b>"]}, "'<b>' is not the shape and dtype of a tensor"),
    "a shape with a line break": ({"tensors": ["float32[3]\n"]}, "is not the shape and dtype of a tensor"),
    "workspaces that are a number": ({"workspaces": 7}, "expected a list of workspaces, not 7"),
    "a workspace that is a number": ({"workspaces": [7]}, "expected from 1 to 100 sizes of a workspace, not 7"),
    "a workspace without sizes": ({"workspaces": [[]]}, "expected from 1 to 100 sizes of a workspace, not a list"),
    "a workspace of many sizes": ({"workspaces": [[0] * 101]}, "expected from 1 to 100 sizes of a workspace"),
    "a workspace of -1 bytes": ({"workspaces": [[0, -1]]}, "the size of a workspace is -1, not a whole number"),
    "a workspace of 2^63 bytes": ({"workspaces": [[1 << 63]]}, "the size of a workspace is 9223372036854775808"),
    "a workspace of half a byte": ({"workspaces": [[0.5]]}, "the size of a workspace is 0.5, not a whole number"),
    "a workspace of true bytes": ({"workspaces": [[True]]}, "the size of a workspace is True, not a whole number"),
    "no workspaces, although a row has one": ({"workspaces": []}, "column 'kind.workspace' has a number outside its"),
    "lines that are texts": ({"lines": ["1"]}, "the lines of its frames are not whole numbers"),
    "a line less": ({"lines": []}, "its frames lack a file, a line or a function"),
    "no files": ({"files": []}, "a stack refers to a frame that is not in the file"),
    "two classes": ({"classes": ["a", "b", "c"]}, "give one for each module"),
}


@pytest.mark.parametrize(("changes", "message"), TABLE_CHANGES.values(), ids=TABLE_CHANGES.keys())
def test_tables_of_a_wrong_kind_are_refused(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    _refused(_changed(tmp_path, lambda content: content.tables.update(changes)), message)


COLUMN_CHANGES: dict[str, tuple[str, int, str]] = {
    "an action that is none": ("kind.action", 11, "column 'kind.action' has a number outside its table"),
    "a category that is none": ("kind.category", 12, "column 'category' has the unknown code 12"),
    "a category of 9 bits": ("kind.category", 256, "column 'category' has a value that no tape has"),
    "a phase that is none": ("period.phase", 4, "column 'phase' has the unknown code 4"),
    "a negative size": ("kind.size", -1, "column 'size' has a value that no tape has"),
    "an address below -1": ("place.address", -2, "column 'address' has a value that no tape has"),
    "a negative time": ("time", -1, "column 'time' has a value that no tape has"),
    "an op outside the table": ("kind.op", 1000, "column 'kind.op' has a number outside its table"),
    "a tensor outside the table": ("kind.tensor", 1000, "column 'kind.tensor' has a number outside its table"),
    "a workspace outside the table": ("kind.workspace", 1, "column 'kind.workspace' has a number outside its table"),
    "a workspace of a free": ("free.workspace", -2, "column 'free.workspace' has a number outside its table"),
    "a stack of a free": ("free.stack", -2, "column 'free.stack' has a number outside its table"),
    "a kind that is not there": ("block.kind", 1 << 40, "column 'block.kind' has a number outside its table"),
    "a place that is not there": ("event.place", -1, "column 'event.place' has a number outside its table"),
    "a free that is not there": ("block.free", 100, "column 'block.free' has a number outside its table"),
    "a free of a block that is not freed": ("block.free", 1, "one that is not does"),
    "a life without a free": ("block.life", 14, "a block that is freed says nothing about its free"),
    "an event behind the end": ("event.row", 15, "its blocks and events are not the rows"),
    "a life of 2^63": ("block.life", (1 << 63) - 1, "column 'block.life' has a number outside its table"),
    "two births in one row": ("block.born", 2, "its blocks and events are not the rows"),
    "an event before the first row": ("event.row", -1, "its blocks and events are not the rows"),
    "periods out of order": ("period.row", 3, "its periods are not in order"),
    "a step of 33 bits": ("period.step", 1 << 32, "column 'step' has a value that no tape has"),
    "a stack of more frames": ("stack.frames", 3, "another number of frames"),
    "a stack of fewer than no frames": ("stack.frames", -1, "another number of frames"),
    "a frame that counts from the end": ("stack.frame", -1, "a stack refers to a frame that is not in the file"),
    "a file that is not there": ("frame.file", 9, "a stack refers to a frame that is not in the file"),
}


@pytest.mark.parametrize(("name", "value", "message"), COLUMN_CHANGES.values(), ids=COLUMN_CHANGES.keys())
def test_a_column_with_a_number_that_no_tape_has_is_refused(
    tmp_path: Path, name: str, value: int, message: str
) -> None:
    # The first block is the weight, which is never freed.
    _refused(_changed(tmp_path, lambda content: content.columns[name].__setitem__(0, value)), message)


@pytest.mark.parametrize(
    "name", ["time", "block.life", "event.kind", "free.op", "kind.size", "period.phase", "stack.frame"]
)
def test_a_column_of_another_length_or_none_is_refused(tmp_path: Path, name: str) -> None:
    shorter = _changed(tmp_path, lambda content: content.columns.update({name: content.columns[name][:-1]}))
    _refused(shorter, "")
    _refused(_changed(tmp_path, lambda content: content.columns.pop(name)), f"it has no column {name!r}")


def test_files_of_earlier_releases_have_no_workspaces(tmp_path: Path) -> None:
    def remove(content: Content) -> None:
        del content.tables["workspaces"], content.columns["kind.workspace"], content.columns["free.workspace"]

    assert_same(Tape.load(_changed(tmp_path, remove)), _with_tensor().without_workspaces())


def test_a_tape_without_workspaces_writes_none(tmp_path: Path) -> None:
    content = content_of(sample_tapes.small_tape(), tmp_path)
    assert not [name for name in (*content.tables, *content.columns) if "workspace" in name]


def test_columns_and_fields_of_later_releases_are_ignored(tmp_path: Path) -> None:
    def add(content: Content) -> None:
        content.header |= {"flavour": [1]}
        content.header["meta"]["flavour"] = [1]
        content.tables["flavours"] = {}
        content.columns = {"flavour": np.arange(3), **content.columns}

    assert_same(Tape.load(_changed(tmp_path, add)), _with_tensor())


def test_names_are_one_printable_line(tmp_path: Path) -> None:
    path = _changed(tmp_path, lambda content: content.tables["modules"].__setitem__(0, "a\x1b[2J\n"))
    assert Tape.load(path).modules[0] == "a�[2J�"


DESCRIPTIONS: dict[str, tuple[Any, str]] = {
    "no list": ({}, "its columns are described by a dict"),
    "no object": ([3], "a column is described by 3"),
    "no width": ([{"name": "time", "length": 1}], "no length, or no width"),
    "another width": ([{"name": "time", "length": 1, "width": 3}], "no length, or no width"),
    "a negative length": ([{"name": "time", "length": -1, "width": 1}], "no length, or no width"),
    "a length of 64 bits": ([{"name": "time", "length": 1 << 64, "width": 1}], "something else than whole numbers"),
    "a unit that is a fraction": (
        [{"name": "time", "length": 1, "width": 1, "unit": 0.5}],
        "something else than whole numbers",
    ),
    "more than memory": ([{"name": "time", "length": 1 << 62, "width": 8}], "bytes of columns in"),
    "more rows than the tape": ([{"name": "block.born", "length": 16, "width": 1}], "a column is longer than the tape"),
}


@pytest.mark.parametrize(("columns", "message"), DESCRIPTIONS.values(), ids=DESCRIPTIONS.keys())
def test_descriptions_of_columns_that_are_wrong_are_refused(tmp_path: Path, columns: Any, message: str) -> None:
    path = tmp_path / "changed.tape"
    path.write_bytes(packed(content_of(sample_tapes.small_tape(), tmp_path), columns=columns))
    _refused(path, message)


@pytest.mark.parametrize(
    ("entries", "message"),
    [
        ({"rows": -1}, "the number of rows is -1"),
        ({"rows": 1 << 40}, "it declares 1099511627776 rows"),
        ({"rows": None}, "the number of rows is None"),
        ({"rows": 14}, "a column is longer than the tape"),
        ({"rows": 16}, "column 'time' has another length than the tape"),
        ({"tables": 1 << 50}, "bytes of columns in"),
        ({"tables": "x"}, "the length of its tables is 'x'"),
        ({"meta": None}, "its metadata are not a JSON object but None"),
    ],
)
def test_headers_that_are_wrong_are_refused(tmp_path: Path, entries: dict[str, Any], message: str) -> None:
    path = tmp_path / "changed.tape"
    path.write_bytes(packed(content_of(sample_tapes.small_tape(), tmp_path), **entries))
    _refused(path, message)


@pytest.mark.parametrize(
    "header", [b"[" * 100_000, b'{"a":' * 100_000, b"", b"\xff", b'{"rows": ' + b"1" * 5000 + b"}", b"null"]
)
def test_a_header_that_is_no_object_is_refused(tmp_path: Path, header: bytes) -> None:
    path = tmp_path / "changed.tape"
    path.write_bytes(with_header(header, zlib.compress(b"{}")))
    _refused(path, "its metadata" if header != b"null" else "the entries of its header are not a JSON object but None")


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "it does not begin as a tape does"),
        (b"PAR0", "it does not begin as a tape does"),
        (b"memexplore tape 2\n" + bytes(100), "a later memexplore wrote it"),
        (MAGIC, "it ends early"),
        (MAGIC + b"\xff\xff\xff\xff{}", "it ends early"),
    ],
)
def test_a_file_that_begins_otherwise_is_refused(tmp_path: Path, data: bytes, message: str) -> None:
    path = tmp_path / "other.tape"
    path.write_bytes(data)
    _refused(path, message)


@pytest.mark.parametrize("cut", [1, 20, 200])
def test_a_file_that_ends_early_is_refused(tmp_path: Path, cut: int) -> None:
    path = saved(sample_tapes.small_tape(), tmp_path)
    path.write_bytes(path.read_bytes()[:-cut])
    _refused(path, "its columns")


def test_a_file_with_more_behind_its_end_is_refused(tmp_path: Path) -> None:
    path = saved(sample_tapes.small_tape(), tmp_path)
    path.write_bytes(path.read_bytes() + b"\0")
    _refused(path, "its columns have another length than it declares")


def test_millions_of_equal_rows_in_a_small_file_are_not_read(tmp_path: Path) -> None:
    rows = 20_000_000
    content = content_of(sample_tapes.small_tape()[:0], tmp_path)
    content.header["rows"] = rows
    column = {"name": "time", "length": rows, "width": 1}
    stream = zlib.compress(b"{}" + bytes(rows))
    header = json.dumps(content.header | {"tables": 2, "columns": [column]}).encode()
    path = tmp_path / "bomb.tape"
    path.write_bytes(with_header(header, stream))
    assert path.stat().st_size < 30_000
    _refused(path, "it declares 20000000 rows and 20000002 bytes of columns in")


def test_a_stream_that_expands_to_more_than_it_declares_is_not_read(tmp_path: Path) -> None:
    content = content_of(sample_tapes.small_tape(), tmp_path)
    data = packed(content)
    end = 22 + int.from_bytes(data[18:22], "little")
    path = tmp_path / "bomb.tape"
    path.write_bytes(data[:end] + zlib.compress(bytes(1 << 30), 1))
    _refused(path, "its columns have another length than it declares")


@pytest.mark.parametrize("device", ["cuda:²", "cuda:99999999999", "cuda:-1", "cuda:"])
def test_a_device_without_a_number_is_device_0(tmp_path: Path, device: str) -> None:
    # "²" is a digit of Unicode; as_snapshot makes a list for each device below the number.
    path = _changed(tmp_path, lambda content: content.header["meta"].update(device=device))
    [number] = snapshot.load(path)
    assert number == 0
    assert len(snapshot.as_snapshot(replay(Tape.load(path)))["device_traces"]) == 1


def test_a_tape_without_addresses_is_opened_with_one_sentence(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = saved(Tape.from_columns({"size": [100]}, meta=Meta(Source.MEASURED, "cuda:0")), tmp_path)
    with pytest.raises(SystemExit):
        cli.main(["open", str(path)])
    [line] = capsys.readouterr().err.splitlines()
    advice = "call memexplore.replay(tape) first, which assigns every address"
    assert line == f"memexplore: {path}: this tape is not placed: {advice}"


def test_a_tape_is_loaded_whatever_its_name(tmp_path: Path) -> None:
    path = tmp_path / "tape"
    sample_tapes.small_tape().save(path)
    assert mx.load(path)[0].equals(sample_tapes.small_tape())
