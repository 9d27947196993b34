"""Folders of ranks as Parquet files for other programs."""

from __future__ import annotations

from pathlib import Path

import pytest

from memexplore.cli import commands
from tests.ranks.test_ranks import MIB, tape, write_rank

pandas = pytest.importorskip("pandas")
pytest.importorskip("pyarrow")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write_rank(tmp_path, 0, MIB, 10 * MIB)
    write_rank(tmp_path, 7, MIB, 12 * MIB, MIB)
    return tmp_path


def test_steps_and_events_are_tables_with_a_column_rank(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert commands.main(["export", str(folder), "--parquet"]) == 0
    assert capsys.readouterr().out == f"Wrote the steps of 2 ranks and 2 tapes: {folder / 'parquet'}\n"
    steps = pandas.read_parquet(folder / "parquet" / "steps")
    assert steps.astype({"rank": int}).groupby("rank")["peak_allocated"].max().tolist() == [10 * MIB, 12 * MIB]
    events = pandas.read_parquet(folder / "parquet" / "events")
    assert events.astype({"rank": int}).groupby("rank")["size"].sum().tolist() == [10 * MIB, 12 * MIB]


def test_whole_tapes_are_exported_too(tmp_path: Path) -> None:
    tape(MIB).save(tmp_path / "rank-3.tape")
    assert commands.main(["export", str(tmp_path), "--parquet", "-o", str(tmp_path / "out")]) == 0
    names = sorted(str(path.relative_to(tmp_path / "out")) for path in (tmp_path / "out").rglob("*.parquet"))
    assert names == ["events/rank=3/step-0.parquet", "steps/rank=3/steps.parquet"]


def test_files_that_are_there_are_not_replaced(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert commands.main(["export", str(folder), "--parquet"]) == 0
    with pytest.raises(SystemExit):
        commands.main(["export", str(folder), "--parquet"])
    assert "is not empty: name another folder with -o, or remove it" in capsys.readouterr().err


def test_a_folder_without_ranks_or_another_form_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        commands.main(["export", str(tmp_path), "--parquet"])
    assert "has no ranks" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        commands.main(["export", str(tmp_path)])
    assert "--parquet" in capsys.readouterr().err
