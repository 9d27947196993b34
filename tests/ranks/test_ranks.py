"""Folders of watched runs: what a rank writes is read again, also of a rank that died, and ranks are compared."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import memexplore as mx
from memexplore.ranks.ranks import Ranks
from memexplore.ranks.rows import StepRow
from memexplore.ranks.writer import Writer
from memexplore.tape import Category, Meta, Source, Tape

MIB = 1024**2


def tape(peak: int) -> Tape:
    columns = {"address": [0, 1 << 30], "size": [512, peak - 512], "category": [Category.PARAMETER, Category.INPUT]}
    return Tape.from_columns(columns, meta=Meta(Source.MEASURED, "cuda:0"))


def write_rank(folder: Path, rank: int, *peaks: int, error: str = "", state: str = "ended") -> Writer:
    """A rank with one step for each peak and a tape of its highest."""
    writer = Writer(folder, rank, {"device": "cuda:0", "capacity": 64 * MIB})
    for step, peak in enumerate(peaks, 1):
        writer.add(StepRow(step, 0.1, peak, 2 * peak, peak // 2))
    highest = max(peaks)
    writer.add_tape(peaks.index(highest) + 1, tape(highest))
    writer.flush()
    writer.describe(state, error)
    return writer


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for rank, peak in enumerate((10 * MIB, 12 * MIB, 30 * MIB, 11 * MIB)):
        write_rank(tmp_path, rank, MIB, peak, MIB)
    return tmp_path


def test_the_rank_with_the_highest_peak_comes_first(folder):
    table = mx.load(folder).table()
    assert table["rank"].tolist() == [2, 1, 3, 0]
    assert table["peak_allocated"].tolist()[0] == 30 * MIB
    assert (table["peak_step"] == 2).all()
    assert (table["allocated_after"] == MIB // 2).all()


def test_a_rank_that_failed_comes_before_all_others(folder):
    write_rank(folder, 4, MIB, error="OutOfMemoryError: (train.py:7)", state="failed")
    ranks = mx.load(folder)
    assert ranks.worst == 4
    assert "1 ended with an error, first rank 4: OutOfMemoryError: (train.py:7)" in ranks.text


def test_the_rank_that_failed_first_comes_first(folder, monkeypatch):
    for rank, (clock, error) in enumerate([(30.0, "RuntimeError: closed by peer"), (20.0, "OutOfMemoryError")], 4):
        monkeypatch.setattr("time.time", lambda clock=clock: clock)
        write_rank(folder, rank, (10 - rank) * MIB, error=error, state="failed")
    ranks = mx.load(folder)
    assert ranks.table()["rank"].tolist()[:3] == [5, 4, 2]
    assert "2 ended with an error, first rank 5: OutOfMemoryError" in ranks.text


def test_the_text_compares_the_worst_rank_with_a_typical_one(folder):
    assert mx.load(folder).text == (
        "4 ranks · rank 2 has the highest peak: 30.0 MiB in step 2, +19.0 MiB (+173 %) beside rank 3"
    )


def test_the_difference_is_that_of_the_tapes_at_their_peaks(folder):
    difference = mx.load(folder).difference()
    row = difference.set_index("category").loc["input"]
    assert row["difference"] == (30 - 11) * MIB


def test_rows_and_tapes_are_those_that_were_written(folder):
    ranks = mx.load(folder)
    assert ranks.steps(1)["peak_allocated"].tolist() == [MIB, 12 * MIB, MIB]
    assert ranks.recorded(1) == [2]
    assert ranks.tape(1, 2).equals(tape(12 * MIB))
    assert ranks.tape().peak()[0] == 30 * MIB


def test_steps_of_all_ranks_are_one_table(folder):
    steps = mx.load(folder).steps()
    assert steps.columns[0] == "rank"
    assert steps.groupby("rank")["peak_allocated"].max().tolist() == [peak * MIB for peak in (10, 12, 30, 11)]
    assert len(steps) == 12


def test_a_step_or_a_rank_that_is_not_there_is_named(folder):
    ranks = mx.load(folder)
    with pytest.raises(LookupError, match="rank 1 has no tape of step 7; it has: 2"):
        ranks.tape(1, 7)
    with pytest.raises(LookupError, match="no rank 9; it has 4 ranks"):
        ranks.steps(9)


def test_rows_are_added_to_one_file(tmp_path):
    writer = Writer(tmp_path, 0, {})
    for step in range(1, 68):
        writer.add(StepRow(step, 0.1, step))
        writer.flush()
    assert sorted(path.name for path in (tmp_path / "rank=0").iterdir()) == ["run.json", "steps.jsonl"]
    assert Ranks(tmp_path).steps(0)["step"].tolist() == list(range(1, 68))


def test_every_field_of_a_row_is_kept(tmp_path):
    row = StepRow(1, 0.5, 2, 3, 4, "a rise", 5, 6, 7, "counter", "first", 8, 9, True, "8×256 int64", "an error", 10, 11)
    assert all(value != StepRow._field_defaults.get(name) for name, value in row._asdict().items())
    writer = Writer(tmp_path, 0, {})
    writer.add(row)
    writer.flush()
    assert Ranks(tmp_path).rows(0) == [row]


def test_an_unfinished_file_or_line_is_not_read(folder):
    (folder / "rank=0" / "step-9.tape.unfinished").write_bytes(b"memexplore tape")
    with (folder / "rank=0" / "steps.jsonl").open("a") as file:
        file.write('{"step": 4, "peak_al')
    ranks = mx.load(folder)
    assert len(ranks.steps(0)) == 3
    assert ranks.recorded(0) == [2]


@pytest.mark.parametrize(
    "line",
    [
        "",
        "[" * 100_000,
        "7",
        '{"seconds": 1}',
        '{"step": "1"}',
        '{"step": 1, "peak_allocated": 0.5}',
        '{"step": 1, "peak_allocated": 1' + "0" * 30 + "}",
        '{"step": 1, "inputs": 3}',
        '{"step": 1, "seconds": NaN}',
        '{"step": 1, "skipped": 1}',
    ],
)
def test_a_line_that_is_no_row_is_named(folder, line):
    with (folder / "rank=0" / "steps.jsonl").open("a") as file:
        file.write(line + "\n")
    with pytest.raises(ValueError, match=r"steps\.jsonl is damaged: line 4 is no row of a step"):
        mx.load(folder).steps(0)
    assert len(mx.load(folder).table()) == 4  # of which the descriptions are enough


def test_texts_of_rows_are_printable_and_later_fields_are_ignored(folder):
    with (folder / "rank=0" / "steps.jsonl").open("a") as file:
        file.write('{"step": 4, "inputs": "\\u001b[2J", "flavour": []}\n')
    assert mx.load(folder).rows(0)[-1].inputs == "�[2J"


def test_totals_that_are_missing_or_wrong_follow_from_the_rows(folder):
    expected = mx.load(folder).table()
    path = folder / "rank=2" / "run.json"
    for totals in (None, 7, {"steps": "x"}, {"steps": 1, "flavour": 2}, {"steps": 1 << 70}):
        path.write_text(json.dumps(json.loads(path.read_text()) | {"totals": totals}))
        assert mx.load(folder).table().equals(expected)


def test_a_description_that_cannot_be_read_is_named(folder):
    (folder / "rank=0" / "run.json").write_text("[" * 100_000)
    table = mx.load(folder).table().set_index("rank")
    assert table.loc[0, "error"] == "its run.json cannot be read"


def test_a_folder_of_an_earlier_run_is_not_replaced(tmp_path):
    Writer(tmp_path, 0, {})
    with pytest.raises(FileExistsError, match="rank=0 exists already"):
        Writer(tmp_path, 0, {})


def test_a_folder_without_ranks_is_refused(tmp_path):
    with pytest.raises(ValueError, match="has no ranks"):
        mx.load(tmp_path)


PROGRAM = """
import os, sys, torch, memexplore as mx
from memexplore.ranks import writer
writer.SECONDS = 0.0
model = torch.nn.Linear(64, 64)
optimizer = torch.optim.SGD(model.parameters())
with mx.watch(model, optimizer, folder=sys.argv[1], first=2, every=1000):
    for step in range(20):
        model(torch.ones(8, 64)).sum().backward()
        optimizer.step()
    os._exit(9)
"""


def test_a_process_that_dies_leaves_its_steps_and_tapes(tmp_path):
    environment = os.environ | {"RANK": "3", "WORLD_SIZE": "8"}
    result = subprocess.run([sys.executable, "-c", PROGRAM, str(tmp_path)], env=environment, check=False)
    assert result.returncode == 9
    ranks = mx.load(tmp_path)
    table = ranks.table()
    assert table["rank"].tolist() == [3]
    assert table["state"].tolist() == ["died"]
    assert "1 ended without a message, as if killed: rank 3" in ranks.text
    assert ranks.steps(3)["step"].tolist()[:15] == list(range(1, 16))
    assert ranks.recorded(3) == [1, 2]
    assert ranks.tape(3, 2).peak()[0] == table["peak_allocated"].iloc[0]


def test_a_saved_run_is_read_again(tmp_path):
    import torch

    model = torch.nn.Linear(64, 64)
    optimizer = torch.optim.SGD(model.parameters())
    with mx.watch(model, first=2, every=1000) as live:
        for _ in range(5):
            model(torch.ones(8, 64)).sum().backward()
            optimizer.step()
    live.save(tmp_path)
    ranks = mx.load(tmp_path)
    names = ["step", "peak_allocated", "rose_because", "inputs"]
    assert ranks.steps(0)[names].to_dict("list") == live.steps()[names].to_dict("list")
    assert ranks.recorded(0) == live.recorded == [1, 2]
    assert ranks.tape(0, 2).equals(live.tape(2))
    assert np.isclose(ranks.table()["seconds"].iloc[0], live.steps()["seconds"].median())
