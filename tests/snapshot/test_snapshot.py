"""Snapshot files of PyTorch: events, stacks, devices, settings and the blocks of a late history."""

from __future__ import annotations

import gzip
import pickle
from pathlib import Path

import pytest

from memexplore import snapshot
from memexplore.allocator import Settings
from memexplore.analysis import curves
from memexplore.tape import Frame, Phase, Source
from tests.snapshot.snapshot_files import (
    BASE,
    MIB,
    NATIVE,
    STEP,
    block,
    event,
    load_one,
    rows_of,
    segment,
    small_snapshot,
    written,
)


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
