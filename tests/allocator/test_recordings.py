"""Every kept recording of a real GPU, replayed: reproduced events against those possible by index.csv."""

from __future__ import annotations

import csv
import functools
from typing import Any

import numpy as np
import pytest

from memexplore import snapshot
from memexplore.allocator import replay
from memexplore.analysis import curves
from memexplore.snapshot.recorded import Recorded
from memexplore.snapshot.verify import verify_device
from memexplore.tape import Action, Tape
from tests.data import kept

MIB = 1024**2

# `lm-medium-train-seq512`: ten addresses depend on a remainder that a block had absorbed before the trace began.
# `synthetic-parser-only`: random data that no allocator made.
NOT_REPLAYED_ALIKE = ("lm-medium-train-seq512", "synthetic-parser-only")


def _index() -> list[dict[str, str]]:
    with open(kept.INDEX, newline="") as file:
        rows = list(csv.DictReader(file))
    return [row | {"recording": row["recording"].removesuffix(".pickle.gz")} for row in rows]


INDEX = _index()
BY_RECORDING_AND_DEVICE = pytest.mark.parametrize(
    "row", [pytest.param(row, id=f"{row['recording']}-{row['device']}") for row in INDEX]
)


def device_of(row: dict[str, str]) -> Recorded:
    return kept.devices(row["recording"])[int(row["device"])]


def tape_of(row: dict[str, str]) -> Tape:
    return kept.tape(row["recording"], int(row["device"]))


@functools.cache
def _verified(recording: str, device: int) -> dict[str, Any]:
    return verify_device(kept.devices(recording)[device])


def verified(row: dict[str, str]) -> dict[str, Any]:
    return _verified(row["recording"], int(row["device"]))


def test_the_index_lists_every_device_of_every_recording() -> None:
    assert len(INDEX) == 31


@BY_RECORDING_AND_DEVICE
def test_alloc_addresses_are_reproduced_as_the_index_says(row: dict[str, str]) -> None:
    reproduced, every = verified(row)["alloc_addresses"]
    expected = row["reproducible_alloc_addresses"] or f"{every}/{every}"
    assert f"{reproduced}/{every}" == expected


@BY_RECORDING_AND_DEVICE
def test_segment_allocs_are_reproduced_as_the_index_says(row: dict[str, str]) -> None:
    reproduced, every = verified(row)["segment_allocs"]
    assert f"{reproduced}/{every}" == (row["reproducible_segment_allocs"] or "0/0")


@BY_RECORDING_AND_DEVICE
@pytest.mark.parametrize("kind", ["segment_frees", "segment_maps", "segment_unmaps"])
def test_releases_and_mappings_are_reproduced_in_order(row: dict[str, str], kind: str) -> None:
    reproduced, every = verified(row)[kind]
    assert reproduced == every
    assert every == actions(row).get(kind.removesuffix("s"), 0)


@BY_RECORDING_AND_DEVICE
def test_the_final_layout_is_reproduced_as_the_index_says(row: dict[str, str]) -> None:
    reproduced, every = verified(row)["final_blocks"]
    expected = row["final_layout"] or f"{every}/{every}"
    assert f"{reproduced}/{every}" == expected


@BY_RECORDING_AND_DEVICE
def test_peaks_are_those_of_the_index(row: dict[str, str]) -> None:
    if not row["peak_allocated_mib"]:
        pytest.skip("the index gives no peaks: it was made without expandable segments, or there is no trace")
    device = verified(row)
    assert round(device["peak_allocated"] / MIB, 2) == float(row["peak_allocated_mib"])
    assert round(device["peak_reserved"] / MIB, 2) == float(row["peak_reserved_mib"])


@BY_RECORDING_AND_DEVICE
def test_completeness_of_the_history(row: dict[str, str]) -> None:
    histories = {"complete-from-first-alloc": "complete", "no-trace": "none", "synthetic": "late"}
    assert verified(row)["history"] == histories.get(row["history"], "late")


@BY_RECORDING_AND_DEVICE
def test_the_tape_has_every_event_and_the_peaks_of_the_replay(row: dict[str, str]) -> None:
    tape = tape_of(row)
    assert snapshot.event_count(tape) == int(row["events"])
    for action in (Action.ALLOC, Action.SEGMENT_ALLOC, Action.OOM):
        recorded = tape.action[len(tape) - snapshot.event_count(tape) :]
        assert np.count_nonzero(recorded == action) == actions(row).get(action.name.lower(), 0)
    if row["recording"] != "synthetic-parser-only":
        assert curves.peak(tape, "allocated")[0] == verified(row)["peak_allocated"]
        assert curves.peak(tape, "reserved")[0] == verified(row)["peak_reserved"]


@BY_RECORDING_AND_DEVICE
def test_replaying_the_tape_gives_the_same_tape(row: dict[str, str]) -> None:
    if row["recording"] in NOT_REPLAYED_ALIKE:
        pytest.skip("see NOT_REPLAYED_ALIKE")
    tape = tape_of(row)
    assert replay(tape).equals(tape)


@BY_RECORDING_AND_DEVICE
def test_the_layout_at_the_end_of_the_tape_is_the_recorded_one(row: dict[str, str]) -> None:
    if row["history"] == "synthetic" or row["recording"].startswith("truncated"):
        pytest.skip("the trace does not lead to the recorded layout")
    tape = tape_of(row)
    states = {"live": "active_allocated", "pending": "active_pending_free", "free": "inactive"}
    expected = [
        (block.address, block.size, states[block.state])
        for segment in device_of(row).segments
        for block in segment.blocks
    ]
    found = [
        (block["address"], block["size"], block["state"])
        for segment in snapshot.layout(tape)
        for block in segment["blocks"]
    ]
    assert found == expected


def actions(row: dict[str, str]) -> dict[str, int]:
    """How often each action occurs, from the index."""
    pairs = (pair.split(":") for pair in row["actions"].strip("{}").split(",") if pair)
    return {name.strip(" '"): int(count) for name, count in pairs}


@pytest.mark.parametrize(
    ("name", "system"),
    [
        ("lm-2.7b-train-seq128-h100", "linux"),
        ("small-lm-train-seq100", "wsl"),
        ("lm-medium-train-seq128", "windows"),
        ("expandable-3gpu-oom", "linux"),
    ],
)
def test_the_operating_system_follows_from_the_addresses(name: str, system: str) -> None:
    assert kept.tape(name).meta.os == system
