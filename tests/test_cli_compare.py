"""`memexplore compare`, and the files that people share: on this machine without a GPU, with two tapes."""

from __future__ import annotations

import io
import json
import pathlib
import sys

import pytest
import torch

import memexplore as mx
from memexplore.cli.commands import main
from tests import shared_measurements


@pytest.fixture(scope="module")
def tapes(tmp_path_factory: pytest.TempPathFactory) -> tuple[pathlib.Path, pathlib.Path]:
    """The same step with weights of 4 MiB and of 8 MiB."""
    folder = tmp_path_factory.mktemp("tapes")
    paths = []
    for name, outputs in (("measured", 1024), ("predicted", 2048)):

        def train(outputs: int = outputs) -> None:
            layer = torch.nn.Linear(1024, outputs, bias=False).cuda()
            layer(torch.zeros(8, 1024, device="cuda")).sum().backward()

        paths.append(folder / f"{name}.tape")
        mx.simulate(train, gpu="T4").save(paths[-1])
    return paths[0], paths[1]


def test_two_tapes_are_compared(tapes, capsys):
    assert main(["compare", *map(str, tapes)]) == 0
    answer, *rest = capsys.readouterr().out.splitlines()
    assert answer.startswith("Allocated +")
    assert "parameter" in answer or "gradient" in answer
    assert any(line.startswith("peak allocated") for line in rest)


def test_the_json_object_is_what_is_shared(tapes, capsys):
    assert main(["compare", *map(str, tapes), "--json"]) == 0
    content = json.loads(capsys.readouterr().out)
    assert content["gpu"] == "Tesla T4"
    assert {group["category"] for group in content["differing"]} >= {"parameter", "gradient"}
    assert [4 << 20, 8 << 20] in [sizes for group in content["differing"] for sizes in group["sizes"]]


def test_a_page_shows_both(tapes, tmp_path):
    page = tmp_path / "page.html"
    assert main(["compare", *map(str, tapes), "--html", str(page)]) == 0
    assert "peak allocated" in page.read_text(encoding="utf-8")


@pytest.mark.parametrize(("answer", "is_written"), [("y\n", True), ("\n", False), ("", False)])
def test_a_shared_file_is_shown_first_and_written_on_request(tapes, tmp_path, monkeypatch, capsys, answer, is_written):
    file = tmp_path / "measured.json"
    monkeypatch.setattr(sys, "stdin", io.StringIO(answer))
    main(["compare", *map(str, tapes), "--share", str(file)])
    assert '"memexplore measurement": 1' in capsys.readouterr().err
    assert file.exists() == is_written


def test_no_other_file_is_replaced(tapes, tmp_path, capsys):
    notes = tmp_path / "notes.json"
    notes.write_text("{}")
    assert main(["compare", *map(str, tapes), "--share", str(notes), "--yes"]) == 2
    assert notes.read_text() == "{}"
    assert "--share" in capsys.readouterr().err


def test_shared_files_become_a_table(tapes, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(shared_measurements, "KEPT", tmp_path / "kept" / "kept.json")
    (tmp_path / "kept").mkdir()
    (tmp_path / "shared").mkdir()
    main(["compare", *map(str, tapes), "--share", str(tmp_path / "shared" / "one.json"), "--yes"])
    (tmp_path / "shared" / "two.json").write_text('{"memexplore measurement": 7}')
    (tmp_path / "shared" / "three.json").write_text("no JSON")
    capsys.readouterr()
    for _ in range(2):  # the second time nothing is added
        assert shared_measurements.main(tmp_path / "shared") == 1
        shown = capsys.readouterr()
        assert shown.out.count("| Tesla T4 |") == 1
        assert "two.json has format 7" in shown.err
        assert "three.json is no file of memexplore compare --share" in shown.err


def test_a_script_needs_a_gpu(tmp_path, capsys):
    script = tmp_path / "train.py"
    script.write_text("import torch")
    assert main(["compare", str(script)]) == 2
    assert "record the program where one is (memexplore run train.py -o measured.tape)" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [(["missing.py"], "no script 'missing.py'"), (["a.py", "--steps", "0"], "--steps: at least one step")],
)
def test_wrong_command_lines_get_one_sentence(arguments, message, capsys):
    assert main(["compare", *arguments]) == 2
    assert message in capsys.readouterr().err
