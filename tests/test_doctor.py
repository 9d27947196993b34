"""`memexplore doctor`: what it says of GPUs and of packages that are missing."""

from __future__ import annotations

import types

import pytest
import torch

from memexplore.cli import doctor


def lines(capsys: pytest.CaptureFixture[str]) -> list[str]:
    doctor.report()
    return capsys.readouterr().out.splitlines()


def test_of_several_gpus_the_first_is_the_one_that_is_measured(monkeypatch, capsys):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    gpu = types.SimpleNamespace(name="Tesla T4", total_memory=1 << 34)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda number: gpu)
    monkeypatch.setattr(doctor, "_virtual_gpu", lambda: True)
    assert [line for line in lines(capsys) if line.startswith("GPU")] == [
        "GPU 0: Tesla T4, 16.0 GiB; `memexplore run` measures on it, unless --gpu names a virtual GPU",
        "GPU 1: Tesla T4, 16.0 GiB",
    ]


@pytest.mark.parametrize(
    ("missing", "expected"),
    [
        ("jupyterlab", ["Missing: jupyterlab. For notebooks: ", "Browser: none found"]),
        ("plotly", ["Missing: plotly. For notebooks: ", "Browser: none found; `memexplore lab --no-"]),
    ],
)
def test_a_missing_package_is_named_with_what_needs_it(missing, expected, monkeypatch, capsys):
    monkeypatch.setattr(doctor, "_version", lambda name: None if name == missing else "1.0")
    monkeypatch.setattr(doctor.shutil, "which", lambda name: None)
    found = [line for line in lines(capsys) if line.startswith(("Missing", "Browser"))]
    assert [line.startswith(start) for line, start in zip(found, expected, strict=True)] == [True, True]
    assert ("lab --no-browser" in found[1]) is (missing != "jupyterlab")
