"""Peaks of ordinary models that were trained on a real GPU beside the predicted ones."""

from __future__ import annotations

import json
import pathlib

import pytest

from tests.gpu import zoo

MEASURED = [(path, name) for path in zoo.measured_files() for name in json.loads(path.read_text())["peaks"]]
# Those of transformers depend on its release; `python -m tests.gpu.zoo` has all of them.
OWN = ("unet", "lenet", "lstm")


@pytest.mark.parametrize(("path", "name"), [pair for pair in MEASURED if pair[1].startswith(OWN)])
def test_peak_is_within_two_percent(path: pathlib.Path, name: str) -> None:
    run = json.loads(path.read_text())
    found = zoo.predicted(name, run["gpu"], run["torch"])["allocated"]
    assert abs(found / run["peaks"][name]["allocated"] - 1) <= 0.02


@pytest.mark.parametrize("path", zoo.measured_files())
def test_gpt2_in_16_bits_is_exact(path: pathlib.Path) -> None:
    pytest.importorskip("transformers")
    run = json.loads(path.read_text())
    found = zoo.predicted("gpt2 bf16", run["gpu"], run["torch"])
    # Measured with transformers 5.17, whose model other releases may write in another way.
    assert abs(found["allocated"] / run["peaks"]["gpt2 bf16"]["allocated"] - 1) <= 0.01
