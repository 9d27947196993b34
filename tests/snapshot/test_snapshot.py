"""Snapshot files: PyTorch's are read, hostile and damaged ones raise one ValueError, memexplore's own round-trip."""

from __future__ import annotations

import contextlib
import gzip
import io
import os
import pickle
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from memexplore import snapshot
from memexplore.allocator import Settings, replay
from memexplore.analysis import curves
from memexplore.snapshot.unpickle import unpickle
from memexplore.tape import Action, Category, Frame, Meta, Phase, Source, Tape

MIB = 1024**2
BASE = 0x7F0000000000

LINE = {"name": "forward", "filename": "/home/me/model.py", "line": 12}
STEP = {"name": "step", "filename": "/venv/torch/optim/adamw.py", "line": 230}
NATIVE = {"name": "at::_ops::mm::call(at::Tensor const&, at::Tensor const&)", "filename": "??", "line": 0}


def event(action: str, address: int, size: int, **others: Any) -> dict[str, Any]:
    return {"action": action, "addr": address, "size": size, "stream": 0, "time_us": 5, "frames": [LINE]} | others


def block(address: int, size: int, requested: int, state: str = "active_allocated") -> dict[str, Any]:
    return {"address": address, "size": size, "requested_size": requested, "state": state, "frames": [LINE]}


def segment(address: int, size: int, *blocks: dict[str, Any], **others: Any) -> dict[str, Any]:
    return {
        "device": 0,
        "address": address,
        "total_size": size,
        "stream": 0,
        "segment_type": "small" if size == 2 * MIB else "large",
        "segment_pool_id": (0, 0),
        "is_expandable": False,
        "frames": [],
        "blocks": list(blocks),
    } | others


def small_snapshot() -> dict[str, Any]:
    """One request of 700 bytes: its segment, its block and the rest of the segment."""
    events = [event("segment_alloc", BASE, 2 * MIB), event("alloc", BASE, 700)]
    rest = block(BASE + 1024, 2 * MIB - 1024, 0, "inactive")
    return {"segments": [segment(BASE, 2 * MIB, block(BASE, 1024, 700), rest)], "device_traces": [events]}


def written(path: Path, content: object, protocol: int = 4) -> Path:
    file = path / "snapshot.pickle"
    file.write_bytes(pickle.dumps(content, protocol))
    return file


def load_one(file: Path) -> Tape:
    [tape] = snapshot.load(file).values()
    return tape


def rows_of(tape: Tape) -> list[tuple[str, int, int]]:
    columns = (tape.action.tolist(), tape.address.tolist(), tape.size.tolist())
    return [(Action(action).name.lower(), address, size) for action, address, size in zip(*columns, strict=True)]


# ---- files of PyTorch


@pytest.mark.parametrize("protocol", range(6))
def test_a_snapshot_of_any_protocol_is_read(tmp_path: Path, protocol: int) -> None:
    tape = load_one(written(tmp_path, small_snapshot(), protocol))
    assert rows_of(tape) == [("segment_alloc", BASE, 2 * MIB), ("alloc", BASE, 700)]
    assert tape.meta.source is Source.IMPORTED
    assert tape.stacks == ((Frame("/home/me/model.py", 12, "forward"),),)


def test_a_gzip_file_is_read(tmp_path: Path) -> None:
    file = tmp_path / "snapshot.pickle.gz"
    file.write_bytes(gzip.compress(pickle.dumps(small_snapshot())))
    assert len(load_one(file)) == 2


def test_missing_fields_are_no_error(tmp_path: Path) -> None:
    content = small_snapshot()
    for each in content["device_traces"][0]:
        del each["time_us"], each["frames"]
    content["segments"][0] = {name: content["segments"][0][name] for name in ("address", "total_size", "blocks")}
    tape = load_one(written(tmp_path, content))
    assert tape.time.tolist() == [0, 1]
    assert tape.stack.tolist() == [-1, -1]


def test_unknown_fields_are_no_error(tmp_path: Path) -> None:
    content = small_snapshot()
    for number, each in enumerate(content["device_traces"][0] * 1):
        each |= {"compile_context": "N/A", "user_metadata": "step " * number, "pool_id": (0, 0), "new": None}
    content["device_traces"][0].append({"action": "annotate", "size": 0, "text": "x"})
    assert [name for name, _, _ in rows_of(load_one(written(tmp_path, content)))] == ["segment_alloc", "alloc"]


def test_blocks_without_an_address_follow_one_another(tmp_path: Path) -> None:
    content = small_snapshot() | {"device_traces": []}
    for each in content["segments"][0]["blocks"]:
        del each["address"]
    assert rows_of(load_one(written(tmp_path, content)))[1] == ("preexisting", BASE, 700)


def test_a_bare_list_of_segments_is_read(tmp_path: Path) -> None:
    assert [name for name, _, _ in rows_of(load_one(written(tmp_path, small_snapshot()["segments"])))] == [
        "segment_alloc",
        "preexisting",
    ]


def test_each_device_has_its_own_tape(tmp_path: Path) -> None:
    content = small_snapshot()
    content["segments"][0]["device"] = 2
    content["device_traces"] = [[], [event("segment_alloc", 0, 2 * MIB)], content["device_traces"][0]]
    tapes = snapshot.load(written(tmp_path, content))
    assert {device: (len(tape), tape.meta.device) for device, tape in tapes.items()} == {
        1: (1, "cuda:1"),
        2: (2, "cuda:2"),
    }


def test_settings_come_from_the_file(tmp_path: Path) -> None:
    content = small_snapshot()
    content["allocator_settings"] = {
        "PYTORCH_CUDA_ALLOC_CONF": "max_non_split_rounding_mb:64",
        "max_split_size": 128 * MIB,
        "expandable_segments": True,
        "garbage_collection_threshold": 0.5,
        "roundup_power2_divisions": {str(1 << index): 4 for index in range(16)},
    }
    assert Settings.parse(load_one(written(tmp_path, content)).meta.settings) == Settings(
        max_non_split_rounding=64 * MIB,
        max_split_size=128 * MIB,
        expandable_segments=True,
        garbage_collection_threshold=0.5,
        roundup_power2_divisions=(4,) * 16,
    )


def test_a_late_history_starts_with_the_initial_blocks(tmp_path: Path) -> None:
    # Blocks of 512 bytes at 0 (freed in the trace), 512 (stays) and 1024 (allocated in the trace).
    blocks = [
        block(BASE, 512, 0, "inactive"),
        block(BASE + 512, 512, 300),
        block(BASE + 1024, 512, 400),
        block(BASE + 1536, 2 * MIB - 1536, 0, "inactive"),
    ]
    events = [
        event("alloc", BASE + 1024, 400),
        event("free_requested", BASE, 200),
        event("free_completed", BASE, 200),
    ]
    content = {"segments": [segment(BASE, 2 * MIB, *blocks)], "device_traces": [events]}
    file = written(tmp_path, content)
    tape = load_one(file)
    assert rows_of(tape)[:3] == [
        ("segment_alloc", BASE, 2 * MIB),
        ("preexisting", BASE, 200),
        ("preexisting", BASE + 512, 300),
    ]
    assert snapshot.event_count(tape) == 3
    assert snapshot.segment_count(tape) == 1
    [device] = snapshot.verify(file)["devices"]
    assert device["history"] == "late"
    assert device["alloc_addresses"] == [1, 1]
    assert device["final_blocks"] == [4, 4]


def test_a_block_before_a_free_range_keeps_its_recorded_size(tmp_path: Path) -> None:
    # 5 MiB were requested and 5 MiB + 512 KiB allocated, before a neighbour that has been freed since.
    size = 5 * MIB + 512 * 1024
    blocks = [block(BASE, size, 5 * MIB), block(BASE + size, 20 * MIB - size, 0, "inactive")]
    content = {"segments": [segment(BASE, 20 * MIB, *blocks)], "device_traces": []}
    tape = load_one(written(tmp_path, content))
    assert curves.peak(tape, "allocated")[0] == size
    assert [each["size"] for each in snapshot.layout(tape)[0]["blocks"]] == [size, 20 * MIB - size]


def test_a_pending_block_is_active_but_not_allocated(tmp_path: Path) -> None:
    blocks = [block(BASE, 512, 500, "active_pending_free"), block(BASE + 512, 2 * MIB - 512, 0, "inactive")]
    content = {"segments": [segment(BASE, 2 * MIB, *blocks)], "device_traces": []}
    tape = load_one(written(tmp_path, content))
    assert int(curves.curve(tape, "allocated")[-1]) == 0
    assert int(curves.curve(tape, "active")[-1]) == 512


def test_the_capacity_follows_from_an_oom(tmp_path: Path) -> None:
    content = small_snapshot()
    oom = {"action": "oom", "device_free": 6 * MIB, "size": 30 * MIB, "stream": 0, "time_us": 6, "frames": []}
    content["device_traces"][0].append(oom)
    tape = load_one(written(tmp_path, content))
    # 2 MiB are reserved and 6 MiB free.
    assert tape.meta.capacity == 8 * MIB
    assert rows_of(tape)[-1] == ("oom", -1, 30 * MIB)


def test_phase_and_operator_follow_from_the_stack(tmp_path: Path) -> None:
    content = small_snapshot()
    content["device_traces"][0][0]["frames"] = [NATIVE, STEP]
    tape = load_one(written(tmp_path, content))
    assert tape.ops == ("aten::mm",)
    assert Phase(tape.phase[0]) is Phase.OPTIMIZER
    assert tape.stacks[0] == (Frame("/venv/torch/optim/adamw.py", 230, "step"),)


@pytest.mark.parametrize("order", ["as torch", "frames first", "no frames"])
def test_many_events_are_read_unchanged(tmp_path: Path, order: str) -> None:
    # Enough events for the regular expression, with references of one and of four bytes and new stacks in between.
    frames = [{"name": f"f{number}", "filename": f"/m{number}.py", "line": number} for number in range(400)]
    events = []
    for number in range(3000):
        size = [1, 255, 256, 65535, 65536, 1 << 31, 1 << 40][number % 7]
        stack = [frames[number % 400], frames[number % 7]] if number % 3 else []
        others = {
            "compile_context": "N/A",
            "user_metadata": "x" * (number % 5),
            "pool": (number % 300, 148),
            "odd": 148,
        }
        made = event("alloc", BASE + 512 * number, size, **others) | {"time_us": 10**15 + number}
        del made["frames"]
        if order == "as torch":
            made["frames"] = stack
        elif order == "frames first":
            made = {"action": "alloc", "frames": stack, **made}
        events.append(made)
    tape = load_one(written(tmp_path, {"segments": [], "device_traces": [events]}))
    assert tape.address.tolist() == [each["addr"] for each in events]
    assert tape.size.tolist() == [each["size"] for each in events]
    assert tape.time.tolist() == [(each["time_us"] - 10**15) * 1000 for each in events]
    stacks = [tape.stacks[number] if number >= 0 else () for number in tape.stack]
    expected = [tuple(Frame(f["filename"], f["line"], f["name"]) for f in each.get("frames", ())) for each in events]
    assert stacks == expected


# ---- hostile files


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


def test_a_list_inside_itself_is_no_event(tmp_path: Path) -> None:
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
    with pytest.raises(ValueError, match="is no snapshot that memexplore can read"):
        snapshot.load(written(tmp_path, content))


@pytest.mark.parametrize(
    "content", [None, 7, "text", {}, {"segments": 7}, {"segments": [], "device_traces": {}}, [7], {1: 2}]
)
def test_a_pickle_of_something_else_is_refused(tmp_path: Path, content: object) -> None:
    with pytest.raises(ValueError, match="is no snapshot that memexplore can read"):
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


@settings(max_examples=400, deadline=None)
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


@settings(max_examples=400, deadline=None)
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


@settings(deadline=None)
@given(PLAIN, st.sampled_from([3, 4, 5]))
def test_plain_data_is_read_as_python_reads_it(content: object, protocol: int) -> None:
    assert unpickle(pickle.dumps(content, protocol)).root == content


# ---- files of memexplore


def predicted() -> Tape:
    """A replayed tape with allocs, frees, a mark, a pending free and an oom."""
    rows = [(Action.ALLOC, 1, 700), (Action.ALLOC, 2, 11 * MIB + 1), (Action.ALLOC, 3, 3 * MIB)]
    rows += [(Action.FREE_REQUESTED, 1, 700), (Action.FREE_COMPLETED, 1, 700), (Action.MARK, -1, 0)]
    rows += [(Action.ALLOC, 4, 100), (Action.FREE_REQUESTED, 3, 3 * MIB), (Action.ALLOC, 5, 90 * MIB)]
    columns: dict[str, Any] = {
        "action": [action for action, _, _ in rows],
        "address": [address for _, address, _ in rows],
        "size": [size for _, _, size in rows],
        "category": [Category.ACTIVATION] * len(rows),
        "op": [0] * len(rows),
        "module": [0] * len(rows),
        "stack": [0] * len(rows),
        "time": [1000 * row for row in range(len(rows))],
    }
    stacks = [(Frame("/home/me/train.py", 7, "<module>"),)]
    meta = Meta(Source.PREDICTED, "cuda:1", capacity=60 * MIB, versions={"torch": "2.13"})
    return replay(Tape.from_columns(columns, meta=meta, ops=["aten::relu"], modules=["layer1"], stacks=stacks))


def test_a_saved_tape_loads_with_the_same_columns(tmp_path: Path) -> None:
    tape = predicted()
    snapshot.save_snapshot(tape, tmp_path / "out.pickle")
    read = snapshot.load(tmp_path / "out.pickle")[1]
    kept = tape.action != Action.MARK
    for name in ("action", "address", "size", "stream", "time"):
        assert np.array_equal(getattr(read, name), getattr(tape, name)[kept])
    assert read.meta.capacity == tape.meta.capacity
    assert read.stacks == tape.stacks


def test_verify_reproduces_a_saved_prediction(tmp_path: Path) -> None:
    tape = predicted()
    assert Action.OOM in tape.action
    snapshot.save_snapshot(tape, tmp_path / "out.pickle")
    [device] = snapshot.verify(tmp_path / "out.pickle")["devices"]
    assert device["history"] == "complete"
    pairs = [value for value in device.values() if isinstance(value, list)]
    assert all(reproduced == every for reproduced, every in pairs)
    assert device["peak_allocated"] == curves.peak(tape, "allocated")[0]


def test_a_late_tape_round_trips(tmp_path: Path) -> None:
    content = small_snapshot() | {"device_traces": [[event("alloc", BASE + 1024, 512)]]}
    rest = block(BASE + 1536, 2 * MIB - 1536, 0, "inactive")
    content["segments"][0]["blocks"][1:] = [block(BASE + 1024, 512, 512), rest]
    tape = load_one(written(tmp_path, content))
    snapshot.save_snapshot(tape, tmp_path / "out.pickle")
    assert load_one(tmp_path / "out.pickle").equals(tape)


def test_a_tape_without_device_addresses_is_not_written(tmp_path: Path) -> None:
    tape = Tape.from_columns({"size": [100]}, meta=Meta(Source.PREDICTED, "cuda:0"))
    with pytest.raises(ValueError, match="call replay"):
        snapshot.save_snapshot(tape, tmp_path / "out.pickle")


def test_load_reads_tape_files_too(tmp_path: Path) -> None:
    tape = predicted()
    tape.save(tmp_path / "tape.parquet")
    assert snapshot.load(tmp_path / "tape.parquet")[1].equals(tape)


@pytest.fixture(scope="module")
def for_torch(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    file = tmp_path_factory.mktemp("torch") / "out.pickle"
    snapshot.save_snapshot(predicted(), file)
    with open(file, "rb") as stream:
        return pickle.load(stream)


def test_torch_summarises_the_segments(for_torch: dict[str, Any]) -> None:
    from torch.cuda import _memory_viz

    text = _memory_viz.segsum(for_torch)
    assert f"segments: {len(for_torch['segments'])}" in text


def test_torch_traces_the_events(for_torch: dict[str, Any]) -> None:
    from torch.cuda import _memory_viz

    text = _memory_viz.trace(for_torch)
    # 90 MiB do not fit into 60 MiB.
    assert "raise OutOfMemoryError" in text
    assert "Device 1" in text


def test_torch_plots_the_events(for_torch: dict[str, Any]) -> None:
    from torch.cuda import _memory_viz

    assert "<!DOCTYPE html>" in _memory_viz.trace_plot(for_torch)
    assert "<!DOCTYPE html>" in _memory_viz.segment_plot(for_torch)


def test_torch_draws_a_flame_graph(for_torch: dict[str, Any]) -> None:
    from torch.cuda import _memory_viz

    lines = io.StringIO()
    _memory_viz.memory(for_torch, format_flamegraph=lines.write)
    assert "train.py:7" in lines.getvalue()
    assert "aten::relu (activation)" in lines.getvalue()
