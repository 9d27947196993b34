"""Folders of watched runs: what a rank writes is read again, also of a rank that died, and ranks are compared."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import memexplore as mx
from memexplore.runs.ranks import Ranks
from memexplore.runs.rows import StepRow
from memexplore.runs.writer import MOST_FILES, Writer
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


def test_without_duckdb_the_command_that_installs_it_here_is_named(folder, monkeypatch):
    monkeypatch.setitem(sys.modules, "duckdb", None)
    # The tests run in a checkout, of which pip installs what the checkout names.
    with pytest.raises(ImportError, match=re.escape('is not installed: pip install -e ".[runs]"')):
        mx.load(folder).table()


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


def test_a_query_sees_steps_and_events_of_all_ranks(folder):
    ranks = mx.load(folder)
    assert ranks.query("SELECT count(*) AS n FROM steps")["n"].tolist() == [12]
    sizes = ranks.query("SELECT rank, sum(size) AS s FROM events GROUP BY rank ORDER BY rank")
    assert sizes["s"].tolist() == [peak * MIB for peak in (10, 12, 30, 11)]


def test_a_step_or_a_rank_that_is_not_there_is_named(folder):
    ranks = mx.load(folder)
    with pytest.raises(LookupError, match="rank 1 has no tape of step 7; it has: 2"):
        ranks.tape(1, 7)
    with pytest.raises(LookupError, match="no rank 9; it has 4 ranks"):
        ranks.steps(9)


def test_many_small_files_become_few(tmp_path):
    writer = Writer(tmp_path, 0, {})
    for step in range(1, MOST_FILES**2 + 4):
        writer.add(StepRow(step, 0.1, step))
        writer.flush()
    files = sorted(path.name for path in (tmp_path / "rank=0" / "steps").iterdir())
    # 64 files became 8, and these one; 3 are left.
    assert files == ["steps-1-64.parquet", "steps-65-65.parquet", "steps-66-66.parquet", "steps-67-67.parquet"]
    assert Ranks(tmp_path).steps(0)["step"].tolist() == list(range(1, 68))


def test_files_that_a_merged_file_covers_are_not_read_twice(tmp_path):
    writer = Writer(tmp_path, 0, {})
    for step in (1, 2):
        writer.add(StepRow(step, 0.1, step))
    writer.flush()
    writer.add(StepRow(1, 0.1, 1))
    writer.flush()  # steps-1-1.parquet beside steps-1-2.parquet, as after a crash while merging
    assert Ranks(tmp_path).steps(0)["step"].tolist() == [1, 2]


def test_an_unfinished_file_is_not_read(folder):
    (folder / "rank=0" / "steps" / "steps-4-9.parquet.unfinished").write_bytes(b"PAR1")
    (folder / "rank=0" / "tapes" / "step-9.parquet.unfinished").write_bytes(b"PAR1")
    ranks = mx.load(folder)
    assert len(ranks.steps(0)) == 3
    assert ranks.recorded(0) == [2]


def test_a_description_that_cannot_be_read_is_named(folder):
    (folder / "rank=0" / "run.json").write_text("[" * 100_000)
    table = mx.load(folder).table().set_index("rank")
    assert table.loc[0, "error"] == "its run.json cannot be read"


def test_a_folder_of_an_earlier_run_is_not_replaced(tmp_path):
    Writer(tmp_path, 0, {})
    with pytest.raises(FileExistsError, match="rank=0 exists already"):
        Writer(tmp_path, 0, {})


def test_a_folder_without_ranks_is_refused(tmp_path):
    with pytest.raises(ValueError, match="has no folders of ranks"):
        mx.load(tmp_path)


PROGRAM = """
import os, sys, torch, memexplore as mx
from memexplore.runs import writer
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
