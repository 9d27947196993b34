"""Files of results: refused before a run where they cannot be written, and else written elsewhere."""

from __future__ import annotations

import pathlib

import pytest

from memexplore.text import result_files
from memexplore.text.result_files import PAGE, PARQUET, TAPE


def test_a_new_file_in_an_existing_folder_is_accepted_and_not_made(tmp_path):
    result_files.check(tmp_path / "page.html", PAGE)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("kind", "content"),
    [(PAGE, b"<!DOCTYPE html><p>old"), (TAPE, b"memexplore tape 1\nold"), (PARQUET, b"PAR1old"), (TAPE, b"")],
)
def test_an_older_result_may_be_replaced(tmp_path, kind, content):
    path = tmp_path / "result"
    path.write_bytes(content)
    result_files.check(path, kind)
    assert path.read_bytes() == content


@pytest.mark.parametrize("kind", [PAGE, TAPE, PARQUET])
def test_a_file_of_another_kind_is_not_replaced(tmp_path, kind):
    path = tmp_path / "train.py"
    path.write_text("print(1)")
    with pytest.raises(ValueError, match=f"train.py' exists and is not {kind.name}"):
        result_files.check(path, kind)


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("", "is a folder"),
        ("/", "is a folder"),
        ("folder", "is a folder; add the name of a file"),
        ("missing/page.html", "the folder 'missing' does not exist; create it first"),
        ("file/page.html", "the folder 'file' is a file, not a folder"),
        ("x" * 300, "cannot be written"),
        ("a\0b", "cannot be written"),
    ],
)
def test_a_path_that_cannot_be_written_is_one_sentence(tmp_path, monkeypatch, path, message):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "folder").mkdir()
    (tmp_path / "file").write_text("")
    with pytest.raises(ValueError, match=message) as raised:
        result_files.check(pathlib.Path(path), PAGE)
    assert "\n" not in str(raised.value)


def test_a_result_whose_path_fails_is_written_to_a_folder_that_the_message_names(tmp_path):
    def write(path: pathlib.Path) -> None:
        path.write_text("result")

    path, problem = result_files.write(tmp_path / "gone" / "page.html", write)
    assert (path.name, path.read_text()) == ("page.html", "result")
    assert str(path) in problem
    assert "No such file or directory" in problem


def test_a_result_is_written_to_its_path(tmp_path):
    path, problem = result_files.write(tmp_path / "page.html", lambda path: path.write_text("result"))
    assert (path.read_text(), problem) == ("result", "")
