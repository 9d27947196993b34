"""Hostile and damaged snapshot files: no code runs, memory is bounded, and one ValueError is raised."""

from __future__ import annotations

import contextlib
import gzip
import os
import pickle
import struct
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from memexplore import snapshot
from memexplore.snapshot.unpickle import unpickle
from tests.snapshot.snapshot_files import (
    BASE,
    MIB,
    event,
    small_snapshot,
    written,
)


class Attack:
    """Pickles as a call of `os.mkdir`."""

    def __init__(self, folder: str) -> None:
        self.folder = folder

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (self.folder,)


@pytest.mark.parametrize("protocol", range(6))
def test_no_code_of_a_hostile_file_runs(tmp_path: Path, protocol: int) -> None:
    target = tmp_path / "made"
    file = written(tmp_path, small_snapshot() | {"more": Attack(str(target))}, protocol)
    with pytest.raises(ValueError, match="refused and nothing of it ran"):
        snapshot.load(file)
    assert not target.exists()


CODE = {
    "GLOBAL": b"cos\nsystem\n(S'true'\ntR.",
    "STACK_GLOBAL": b"\x80\x04\x8c\x02os\x8c\x06system\x93\x8c\x04true\x85R.",
    "INST": b"(S'true'\nios\nsystem\n.",
    "OBJ": b"(cos\nsystem\nS'true'\no.",
    "NEWOBJ": b"\x80\x02cbuiltins\nobject\n)\x81.",
    "EXT1": b"\x80\x02\x82\x01.",
    "EXT4": b"\x80\x02\x84\x01\x00\x00\x00.",
    "PERSID": b"Pos.system\n.",
    "BINPERSID": b"\x8c\x01aQ.",
    "BUILD": b"\x80\x02}}b.",
    "REDUCE": b"\x80\x02}}R.",
    "NEXT_BUFFER": b"\x80\x05\x97.",
}


@pytest.mark.parametrize("data", CODE.values(), ids=CODE.keys())
def test_no_opcode_reaches_code(data: bytes) -> None:
    with pytest.raises(ValueError, match=r"refused|means nothing here"):
        unpickle(data)


BOMBS = {
    "a list in every byte": b"\x80\x04(" + b"]" * 1_000_000 + b"l.",
    "a dictionary in every byte": b"\x80\x04(" + b"}" * 1_000_000 + b"l.",
    "a set in every byte": b"\x80\x04(" + b"\x8f" * 1_000_000 + b"l.",
    "tuples a million deep": b"\x80\x04)" + b"\x85" * 1_000_000 + b".",
    "tuples a thousand deep as a key": b"\x80\x04})" + b"\x85" * 1000 + b"Ns.",
    "a text of 16 EiB": b"\x80\x04\x8d" + struct.pack("<Q", 1 << 63) + b"x.",
    "bytes of 4 GiB": b"\x80\x04B" + struct.pack("<I", 0xFFFFFFFF) + b"x.",
    "a buffer of 16 EiB": b"\x80\x05\x96" + struct.pack("<Q", 1 << 63) + b"x.",
    "a frame of 16 EiB": b"\x80\x04\x95" + struct.pack("<Q", 1 << 63) + b"]",
    "a number of 2 GiB": b"\x80\x02\x8b" + struct.pack("<I", 1 << 31) + b"1.",
    "a number of a million digits": b"I" + b"9" * 1_000_000 + b"\n.",
}


@pytest.mark.parametrize("data", BOMBS.values(), ids=BOMBS.keys())
def test_a_memory_bomb_is_refused(data: bytes) -> None:
    with pytest.raises(ValueError):
        unpickle(data)


def test_a_huge_memo_index_costs_nothing() -> None:
    # Python's own unpickler allocates two billion entries here.
    assert unpickle(b"\x80\x04]r" + struct.pack("<I", 0x7FFFFFFF) + b".").root == []


def test_a_gzip_bomb_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "bomb.gz"
    # 128 MiB of zeros are 128 KiB of gzip.
    file.write_bytes(gzip.compress(bytes(128 * MIB)))
    with pytest.raises(ValueError, match="unpacks to more"):
        snapshot.load(file)


def test_one_trace_under_many_names_is_refused(tmp_path: Path) -> None:
    trace = [event("alloc", BASE, 512)] * 1000
    with pytest.raises(ValueError, match="one trace several times"):
        snapshot.load(written(tmp_path, {"segments": [], "device_traces": [trace] * 1000}))


def test_one_list_of_blocks_under_many_names_is_refused(tmp_path: Path) -> None:
    content = small_snapshot()
    content["segments"] *= 2
    with pytest.raises(ValueError, match="one list of blocks several times"):
        snapshot.load(written(tmp_path, content))


def test_a_list_inside_itself_is_refused(tmp_path: Path) -> None:
    trace: list[Any] = []
    trace.append(trace)
    with pytest.raises(ValueError):
        snapshot.load(written(tmp_path, {"segments": [], "device_traces": [trace]}))


@pytest.mark.parametrize(
    "change",
    [
        {"size": "many"},
        {"size": 1 << 70},
        {"size": 2.5},
        {"size": True},
        {"addr": None},
        {"stream": []},
        {"time_us": "noon"},
        {"action": 7},
        {"frames": [7]},
        {"frames": [{"name": 1, "filename": "", "line": 0}]},
        {"frames": [{}]},
    ],
)
def test_a_field_of_a_wrong_kind_is_refused(tmp_path: Path, change: dict[str, Any]) -> None:
    content = small_snapshot()
    content["device_traces"][0].append(event("alloc", BASE + 1024, 512) | change)
    with pytest.raises(ValueError, match="is not a snapshot that memexplore can read"):
        snapshot.load(written(tmp_path, content))


@pytest.mark.parametrize(
    "content", [None, 7, "text", {}, {"segments": 7}, {"segments": [], "device_traces": {}}, [7], {1: 2}]
)
def test_a_pickle_of_something_else_is_refused(tmp_path: Path, content: object) -> None:
    with pytest.raises(ValueError, match="is not a snapshot that memexplore can read"):
        snapshot.load(written(tmp_path, content))


@pytest.mark.parametrize("data", [b"", b"\x1f\x8b", b"PAR1", b"\x80\x04", b"not a snapshot file", bytes(1000)])
def test_a_file_of_something_else_is_refused(tmp_path: Path, data: bytes) -> None:
    file = tmp_path / "file"
    file.write_bytes(data)
    with pytest.raises(ValueError):
        snapshot.load(file)


def test_a_missing_file_raises_file_not_found(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        snapshot.load(tmp_path / "nothing")


@pytest.mark.parametrize("packed", [False, True])
def test_a_file_cut_anywhere_is_refused(tmp_path: Path, packed: bool) -> None:
    data = pickle.dumps(small_snapshot())
    data = gzip.compress(data) if packed else data
    file = tmp_path / "cut"
    for length in range(len(data)):
        file.write_bytes(data[:length])
        with pytest.raises(ValueError):
            snapshot.load(file)


SEED = pickle.dumps(small_snapshot())


@settings(max_examples=400)
@given(st.lists(st.tuples(st.integers(0, len(SEED) - 1), st.integers(0, 255)), min_size=1, max_size=8))
def test_a_damaged_file_is_read_or_refused(
    tmp_path_factory: pytest.TempPathFactory, changes: list[tuple[int, int]]
) -> None:
    data = bytearray(SEED)
    for position, value in changes:
        data[position] = value
    file = tmp_path_factory.getbasetemp() / "damaged"
    file.write_bytes(bytes(data))
    with contextlib.suppress(ValueError):
        snapshot.load(file)
        snapshot.verify(file)


@settings(max_examples=400)
@given(st.binary(max_size=200))
@example(b"(" * 100)
@example(b"\x94")
@example(b"u")
@example(b"a")
@example(b"\x87")
@example(b"t")
@example(b"g1\n")
@example(b"p\n")
@example(b"F1e999\n.")
def test_any_bytes_are_read_or_refused(data: bytes) -> None:
    with contextlib.suppress(ValueError):
        unpickle(data)


PLAIN = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(1 << 100), 1 << 100)
    | st.floats(allow_nan=False)
    | st.text()
    | st.binary(),
    lambda inner: (
        st.lists(inner) | st.dictionaries(st.text(), inner) | st.tuples(inner) | st.tuples(inner, inner, inner)
    ),
    max_leaves=30,
)


@given(PLAIN, st.sampled_from([3, 4, 5]))
def test_plain_data_is_read_as_python_reads_it(content: object, protocol: int) -> None:
    assert unpickle(pickle.dumps(content, protocol)).root == content
