"""`memexplore run --knob NAME=VALUE`: a script under other knobs, and one sentence for those that cannot act."""

from __future__ import annotations

import json
import pathlib

import pytest

from tests.programs.test_script import NET, TRAIN
from tests.test_cli import memexplore


@pytest.fixture
def path(tmp_path: pathlib.Path) -> pathlib.Path:
    (tmp_path / "net_of_the_script.py").write_text(NET)
    script = tmp_path / "train.py"
    script.write_text(TRAIN)
    return script


def test_knobs_change_the_run_and_are_named(path: pathlib.Path) -> None:
    knobs = ("--knob", "batch=16", "--knob", "precision=bf16", "--knob", "gpu=A100")
    done = memexplore("run", path, "--json", *knobs, "-o", path.parent / "cut.tape")
    assert done.returncode == 0, done.stderr
    assert (json.loads(done.stdout)["gpu"], done.stderr) == ("A100 40GB", "trained\n")
    text = memexplore("run", path, "--gpu", "T4", *knobs[:4]).stdout
    assert "Knobs: precision bf16, batch 16." in text
    assert "Autocast is around the model's calls only. With the loss in autocast too" in text


@pytest.mark.parametrize(
    ("knob", "sentence"),
    [
        ("bach=16", "'bach=16' is not a knob with a value; write one such as batch=16, of inplace, checkpoint, "),
        ("precision=fp8", "precision='fp8' is not a setting; write one of as written, off, fp16, bf16, all bf16"),
        ("lora=head", "Sequential has no layer 'head'; it has: '0', '1', '2'"),
        ("checkpoint=layers head", "Sequential has no layer 'head'; it has: '0', '1', '2'"),
        ("input_size=8", "input_size cannot be changed: this script makes its own inputs; explore a Step instead"),
        (
            "accumulation=16",
            "accumulation=16 needs as many passes of the loop for a step, and this script ended after 4",
        ),
    ],
)
def test_a_knob_that_cannot_act_is_one_sentence(path: pathlib.Path, knob: str, sentence: str) -> None:
    # 4 batches of 16: with 16 micro-batches of 1 sample the loop is left after 4.
    path.write_text(path.read_text().replace("batches():\n            loss", "list(batches())[:4]:\n            loss"))
    done = memexplore("run", path, "--gpu", "T4", "--knob", knob, "--", "--batch-size", "16")
    assert (done.returncode, len(done.stderr.strip().splitlines())) == (2, 1), done.stderr
    assert done.stderr.startswith(f"memexplore run: --knob: {sentence}")
