"""Folders of ranks that were recorded as a whole: one tape each, of which the overview reads the header."""

from __future__ import annotations

from pathlib import Path

import pytest

import memexplore as mx
from memexplore.ranks.recorded import step_rows
from memexplore.tape import Action, Ending, Meta, Source, Tape
from memexplore.tape.file import read_header

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


def peaks(folder: Path, *sizes: int) -> list[tuple[int, int | None, int | None]]:
    """Step, peak and what is left of each row that stands for a saved tape."""
    tape(*sizes).save(folder / "rank-0.tape")
    rows = step_rows(read_header(str(folder / "rank-0.tape")))
    return [(row.step, row.peak_allocated, row.allocated_after) for row in rows]


def test_each_step_has_its_peak_and_what_is_left(tmp_path: Path) -> None:
    assert peaks(tmp_path, 10, 30, 20) == [(1, 30 * BLOCK, 0), (2, 20 * BLOCK, 0)]


def test_a_set_up_with_the_highest_peak_is_a_row(tmp_path: Path) -> None:
    assert peaks(tmp_path, 40, 30) == [(0, 40 * BLOCK, 0), (1, 30 * BLOCK, 0)]
    assert peaks(tmp_path, 40) == [(0, 40 * BLOCK, 0)]
    assert peaks(tmp_path) == []


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    killed = Meta(Source.PREDICTED, "", ending=Ending.ERROR, error="it was killed")
    for rank, one in enumerate(
        (
            tape(10, 20, 30),
            tape(10, 50, 30),
            tape(10, 25, error="ValueError: no (train.py:3)", ending=Ending.ERROR),
            Tape.from_columns({}, meta=killed),
        )
    ):
        one.save(tmp_path / f"rank-{rank}.tape")
    return tmp_path


def test_ranks_side_by_side(folder: Path) -> None:
    ranks = mx.load(folder)
    table = ranks.table().set_index("rank")
    assert ranks.table()["rank"].tolist() == [2, 3, 1, 0]  # those that failed first, the highest one before others
    assert (table.loc[[0, 1, 2], "peak_allocated"] // BLOCK).tolist() == [30, 50, 25]
    assert table.loc[[0, 1, 2], "peak_step"].tolist() == [2, 1, 1]
    assert table["state"].tolist() == ["failed", "failed", "ended", "ended"]
    assert table.loc[3, "error"] == "it was killed"
    assert ranks.steps(2)["error"].tolist() == ["ValueError: no (train.py:3)"]
    assert ranks.recorded(1) == [1]
    assert ranks.recorded(3) == []
    assert ranks.tape(1).peak() == (50 * BLOCK, 3)


def test_the_overview_reads_headers_only(folder: Path) -> None:
    table = mx.load(folder).table()
    for path in folder.iterdir():
        data = path.read_bytes()
        path.write_bytes(data[: 22 + int.from_bytes(data[18:22], "little")])
    assert mx.load(folder).table().equals(table)


def test_a_tape_that_cannot_be_read_is_named(folder: Path) -> None:
    (folder / "rank-1.tape").write_bytes(b"print(1)")
    ranks = mx.load(folder)
    assert ranks.table().set_index("rank").loc[1, "error"] == "its tape cannot be read"
    with pytest.raises(ValueError, match="not a readable tape"):
        ranks.tape(1)
