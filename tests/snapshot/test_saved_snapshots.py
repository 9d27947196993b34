"""Snapshots that memexplore saves: they round-trip, and torch's own viewer reads them."""

from __future__ import annotations

import io
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from memexplore import snapshot
from memexplore.allocator import replay
from memexplore.analysis import curves
from memexplore.tape import Action, Category, Frame, Meta, Source, Tape
from tests.snapshot.snapshot_files import (
    BASE,
    MIB,
    block,
    event,
    load_one,
    small_snapshot,
    written,
)


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
    tape.save(tmp_path / "tape.tape")
    assert snapshot.load(tmp_path / "tape.tape")[1].equals(tape)


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
