"""Folders of ranks that were recorded one by one."""

from __future__ import annotations

from pathlib import Path

import pytest

import memexplore as mx
from memexplore.runs.recorded_ranks import step_rows, write_rank
from memexplore.tape import Action, Ending, Meta, Source, Tape

BLOCK = 512  # bytes to which a request is rounded


def tape(*sizes: int, **meta: object) -> Tape:
    """A block in the set-up and in each step, freed before the next one; sizes in units of BLOCK."""
    actions = [Action.ALLOC, Action.FREE_REQUESTED, Action.FREE_COMPLETED]
    columns = {
        "action": actions * len(sizes),
        "address": [0] * 3 * len(sizes),
        "size": [size * BLOCK for size in sizes for _ in actions],
        "step": [step for step in range(len(sizes)) for _ in actions],
    }
    about = Meta(Source.PREDICTED, "H100", capacity=1 << 30)._replace(**meta)
    return Tape.from_columns(columns, meta=about)


def test_each_step_has_its_peak_and_what_is_left() -> None:
    rows = step_rows(tape(10, 30, 20))
    assert [(row.step, row.peak_allocated, row.allocated_after) for row in rows] == [
        (1, 30 * BLOCK, 0),
        (2, 20 * BLOCK, 0),
    ]


def test_a_set_up_with_the_highest_peak_is_a_row() -> None:
    assert [(row.step, row.peak_allocated) for row in step_rows(tape(40, 30))] == [(0, 40 * BLOCK), (1, 30 * BLOCK)]
    assert [row.step for row in step_rows(tape(40))] == [0]
    assert step_rows(tape()) == []


def test_ranks_side_by_side(tmp_path: Path) -> None:
    pytest.importorskip("duckdb")
    write_rank(tmp_path, 0, tape(10, 20, 30))
    write_rank(tmp_path, 1, tape(10, 50, 30))
    write_rank(tmp_path, 2, tape(10, 25, error="ValueError: no (train.py:3)", ending=Ending.ERROR))
    write_rank(tmp_path, 3, None, "it was killed")
    ranks = mx.load(tmp_path)
    table = ranks.table().set_index("rank")
    assert ranks.table()["rank"].tolist() == [2, 3, 1, 0]  # those that failed first, the first one before others
    assert (table.loc[[0, 1, 2], "peak_allocated"] // BLOCK).tolist() == [30, 50, 25]
    assert table.loc[[0, 1, 2], "peak_step"].tolist() == [2, 1, 1]
    assert table["state"].tolist() == ["failed", "failed", "ended", "ended"]
    assert table.loc[3, "error"] == "it was killed"
    assert ranks.tape(1).peak() == (50 * BLOCK, 3)
