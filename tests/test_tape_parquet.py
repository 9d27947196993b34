"""Parquet files of tapes, for other programs and of earlier releases; they need pyarrow."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path

import pytest

import memexplore as mx
from memexplore import cli
from memexplore.cli import commands
from memexplore.tape import COLUMNS, Tape
from memexplore.text import result_files
from tests import sample_tapes
from tests.test_tape_file import assert_same

SENTENCE = "Parquet files need pyarrow, which is not installed: pip install pyarrow"


@pytest.fixture
def without_pyarrow(monkeypatch: pytest.MonkeyPatch) -> None:
    find_spec = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "pyarrow" else find_spec(name))


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    pytest.importorskip("pyarrow")
    path = tmp_path / "tape.parquet"
    sample_tapes.training_tape(2, 1, 16, 1).to_parquet(path)
    return path


def test_a_parquet_file_is_loaded_again(saved: Path) -> None:
    tape = sample_tapes.training_tape(2, 1, 16, 1)
    assert_same(tape, Tape.load(saved))
    assert mx.load(saved)[0].equals(tape)


def test_workspaces_are_kept(tmp_path: Path) -> None:
    pytest.importorskip("pyarrow")
    columns = {"size": [1, 2, 3], "workspace": [1, -1, 0]}
    tape = Tape.from_columns(columns, workspaces=[(0, 512), (1 << 40,)], meta=sample_tapes.T4)
    tape.to_parquet(tmp_path / "tape.parquet")
    assert_same(tape, Tape.load(tmp_path / "tape.parquet"))


def test_other_programs_read_a_row_an_event(saved: Path) -> None:
    import pandas

    table = pandas.read_parquet(saved)
    assert list(table.columns) == list(COLUMNS)
    assert table["size"].tolist() == sample_tapes.training_tape(2, 1, 16, 1).size.tolist()


def test_a_path_that_ends_in_parquet_is_saved_as_parquet(tmp_path: Path) -> None:
    pytest.importorskip("pyarrow")
    path = tmp_path / "tape.parquet"
    sample_tapes.small_tape().save(path)
    assert path.read_bytes()[:4] == b"PAR1"


def test_a_parquet_file_is_opened(saved: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert commands.main(["open", str(saved)]) == 0
    assert capsys.readouterr().out.startswith("Device 0: ")


def test_files_of_earlier_releases_are_read(saved: Path) -> None:
    import pyarrow.parquet

    table = pyarrow.parquet.read_table(saved).drop_columns(["tensor", "workspace"])
    tables = json.loads(table.schema.metadata[b"memexplore.tables"])
    meta = json.loads(table.schema.metadata[b"memexplore.tape"])
    for missing in ("tensors", "classes", "workspaces"):
        del tables[missing]
    del meta["capacity_without_limit"]
    metadata = {"memexplore.tables": json.dumps(tables), "memexplore.tape": json.dumps(meta)}
    pyarrow.parquet.write_table(table.replace_schema_metadata(metadata), saved)
    old = Tape.load(saved)
    tape = sample_tapes.training_tape(2, 1, 16, 1)
    assert old.meta == tape.meta
    assert old.size.tolist() == tape.size.tolist()
    assert set(old.tensor.tolist()) == set(old.workspace.tolist()) == {-1}


def test_a_parquet_file_of_another_program_is_refused(tmp_path: Path) -> None:
    pandas = pytest.importorskip("pandas")
    pytest.importorskip("pyarrow")
    path = tmp_path / "table.parquet"
    pandas.DataFrame({"size": [1, 2]}).to_parquet(path)
    with pytest.raises(ValueError, match=r"not a readable tape \(another program wrote it\)"):
        Tape.load(path)


def test_a_parquet_file_that_is_damaged_is_refused(tmp_path: Path) -> None:
    pytest.importorskip("pyarrow")
    path = tmp_path / "no.parquet"
    path.write_bytes(b"PAR1 not really")
    with pytest.raises(ValueError, match="not a readable tape"):
        Tape.load(path)


# -- where pyarrow is not installed


@pytest.mark.usefixtures("without_pyarrow")
def test_one_sentence_names_what_is_missing(tmp_path: Path) -> None:
    path = tmp_path / "tape.parquet"
    with pytest.raises(ImportError, match=SENTENCE):
        sample_tapes.small_tape().to_parquet(path)
    with pytest.raises(ImportError, match=SENTENCE):
        sample_tapes.small_tape().save(path)
    assert not path.exists()
    path.write_bytes(b"PAR1")
    with pytest.raises(ValueError, match=SENTENCE):
        Tape.load(path)


@pytest.mark.usefixtures("without_pyarrow")
def test_a_result_is_refused_before_the_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    script = tmp_path / "train.py"
    script.write_text("print('it ran')")
    status = commands.main(["run", str(script), "--gpu", "T4", "-o", str(tmp_path / "tape.parquet")])
    captured = capsys.readouterr()
    assert status == 2
    assert captured.err == f"memexplore run: -o: {SENTENCE}\n"
    assert "it ran" not in captured.out
    with pytest.raises(ValueError, match=SENTENCE):
        result_files.check(tmp_path / "tape.parquet", result_files.PARQUET)


@pytest.mark.usefixtures("without_pyarrow")
def test_a_folder_is_not_exported(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    sample_tapes.small_tape().save(tmp_path / "rank-0.tape")
    with pytest.raises(SystemExit):
        cli.main(["export", str(tmp_path), "--parquet"])
    assert capsys.readouterr().err == f"memexplore: {tmp_path}: {SENTENCE}\n"
    assert [path.name for path in tmp_path.iterdir()] == ["rank-0.tape"]
