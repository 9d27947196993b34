"""Every recording of a real GPU, replayed: what comes out as recorded, against what index.csv says is possible."""

from __future__ import annotations

import csv
import functools
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from memexplore import snapshot
from memexplore.allocator import replay
from memexplore.analysis import summary
from memexplore.tape import Action, Tape

FOLDER = Path(__file__).parents[3] / "shared" / "recordings"
MIB = 1024**2

# `lm-medium-train-seq512`: ten addresses depend on a remainder that a block had absorbed before the trace began.
# `synthetic-parser-only`: random data that no allocator made.
NOT_REPLAYED_ALIKE = ("lm-medium-train-seq512.pickle.gz", "synthetic-parser-only.pickle.gz")


def _index() -> list[dict[str, str]]:
    if not FOLDER.is_dir():
        return []
    with open(FOLDER / "index.csv", newline="") as file:
        return list(csv.DictReader(file))


INDEX = _index()
BY_FILE_AND_DEVICE = pytest.mark.parametrize(
    "row", [pytest.param(row, id=f"{row['recording'].removesuffix('.pickle.gz')}-{row['device']}") for row in INDEX]
)
verify = functools.cache(snapshot.verify)
load = functools.cache(snapshot.load)


def verified(row: dict[str, str]) -> dict[str, Any]:
    [told] = [each for each in verify(FOLDER / row["recording"])["devices"] if each["device"] == int(row["device"])]
    return told


def loaded(row: dict[str, str]) -> Tape:
    return load(FOLDER / row["recording"])[int(row["device"])]


def test_the_recordings_are_there() -> None:
    if not INDEX and not os.environ.get("CI"):
        pytest.skip("shared/recordings does not lie beside this checkout")
    assert len(INDEX) == 31


@BY_FILE_AND_DEVICE
def test_alloc_addresses_come_out_as_the_index_says(row: dict[str, str]) -> None:
    same, every = verified(row)["alloc_addresses"]
    expected = row["reproducible_alloc_addresses"] or f"{every}/{every}"
    assert f"{same}/{every}" == expected


@BY_FILE_AND_DEVICE
def test_segment_allocs_come_out_as_the_index_says(row: dict[str, str]) -> None:
    same, every = verified(row)["segment_allocs"]
    assert f"{same}/{every}" == (row["reproducible_segment_allocs"] or "0/0")


@BY_FILE_AND_DEVICE
@pytest.mark.parametrize("kind", ["segment_frees", "segment_maps", "segment_unmaps"])
def test_releases_and_mappings_come_out_in_order(row: dict[str, str], kind: str) -> None:
    same, every = verified(row)[kind]
    assert same == every
    assert every == actions(row).get(kind.removesuffix("s"), 0)


@BY_FILE_AND_DEVICE
def test_the_final_layout_comes_out_as_the_index_says(row: dict[str, str]) -> None:
    same, every = verified(row)["final_blocks"]
    expected = row["final_layout"] or f"{every}/{every}"
    assert f"{same}/{every}" == expected


@BY_FILE_AND_DEVICE
def test_peaks_are_those_of_the_index(row: dict[str, str]) -> None:
    if not row["peak_allocated_mib"]:
        pytest.skip("the index gives no peaks: it was made without expandable segments, or there is no trace")
    device = verified(row)
    assert round(device["peak_allocated"] / MIB, 2) == float(row["peak_allocated_mib"])
    assert round(device["peak_reserved"] / MIB, 2) == float(row["peak_reserved_mib"])


@BY_FILE_AND_DEVICE
def test_history_is_told_apart(row: dict[str, str]) -> None:
    words = {"complete-from-first-alloc": "complete", "no-trace": "none", "synthetic": "late"}
    assert verified(row)["history"] == words.get(row["history"], "late")


@BY_FILE_AND_DEVICE
def test_the_tape_has_every_event_and_the_peaks_of_the_replay(row: dict[str, str]) -> None:
    tape = loaded(row)
    assert snapshot.event_count(tape) == int(row["events"])
    for action in (Action.ALLOC, Action.SEGMENT_ALLOC, Action.OOM):
        recorded = tape.action[len(tape) - snapshot.event_count(tape) :]
        assert np.count_nonzero(recorded == action) == actions(row).get(action.name.lower(), 0)
    if row["recording"] != "synthetic-parser-only.pickle.gz":
        assert summary.peak(tape, "allocated")[0] == verified(row)["peak_allocated"]
        assert summary.peak(tape, "reserved")[0] == verified(row)["peak_reserved"]


@BY_FILE_AND_DEVICE
def test_replaying_the_tape_gives_the_same_tape(row: dict[str, str]) -> None:
    if row["recording"] in NOT_REPLAYED_ALIKE:
        pytest.skip("see NOT_REPLAYED_ALIKE")
    tape = loaded(row)
    assert replay(tape).equals(tape)


@BY_FILE_AND_DEVICE
def test_the_layout_at_the_end_of_the_tape_is_the_recorded_one(row: dict[str, str]) -> None:
    if row["history"] == "synthetic" or row["recording"].startswith("truncated"):
        pytest.skip("the trace does not lead to the recorded layout")
    [recorded] = [each for each in snapshot.read(FOLDER / row["recording"]) if each.device == int(row["device"])]
    tape = loaded(row)
    states = {"live": "active_allocated", "pending": "active_pending_free", "free": "inactive"}
    expected = [
        (block.address, block.size, states[block.state]) for segment in recorded.segments for block in segment.blocks
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
