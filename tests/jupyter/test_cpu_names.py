"""Cells that train on the CPU because an earlier cell chose the device, and cells that end in an error."""

from __future__ import annotations

import pytest

from memexplore.analysis.verdict import Verdict, verdict
from memexplore.analysis.verdict_content import verdict_content
from tests.jupyter.magics_shell import Shell

CHOICE = 'device = "cuda" if torch.cuda.is_available() else "cpu"\nmodel = torch.nn.Linear(8, 8).to(device)'
TRAINING = """optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
model(torch.ones(2, 8, device=device)).sum().backward()
optimizer.step()"""


@pytest.fixture(autouse=True)
def without_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)


def test_device_of_an_earlier_cell_is_named_with_what_to_write(shell: Shell) -> None:
    shell.run(CHOICE).raise_error()
    shell.run(f"%%memprofile --gpu T4 -o tape\n{TRAINING}").raise_error()
    first, second = verdict_content(shell["tape"]).text.splitlines()
    assert first == "Nothing trained on the Tesla T4: Linear trained on the CPU"
    assert second.startswith(
        "device is the CPU, set by a cell that ran before the virtual GPU was on: "
        "write %memgpu T4 in the first cell, and run all cells again"
    )


def test_an_array_is_no_name_of_a_device(shell: Shell) -> None:
    shell.run(f"import numpy\ndev_losses = numpy.array([1.0, 2.0])\n{CHOICE}").raise_error()
    shell.run(f"%%memprofile --gpu T4 -o tape\n{TRAINING}").raise_error()
    assert shell["tape"].meta.advice.startswith("device is the CPU")


def test_following_the_advice_trains_on_the_gpu(shell: Shell) -> None:
    shell.run("%memgpu T4").raise_error()
    shell.run(CHOICE).raise_error()
    shell.run(f"%%memprofile --gpu T4 -o tape\n{TRAINING}").raise_error()
    assert verdict(shell["tape"]) is Verdict.FITS


def test_model_of_an_earlier_cell_is_named(shell: Shell) -> None:
    shell.run("network = torch.nn.Linear(8, 8)").raise_error()
    shell.run("%%memprofile --gpu 24GiB -o tape\nnetwork(torch.ones(2, 8)).sum().backward()").raise_error()
    assert "network is on the CPU" in shell["tape"].meta.advice
    assert "write %memgpu 24GiB in the first cell" in shell["tape"].meta.advice


def test_device_of_the_cell_itself_is_to_be_changed_there(shell: Shell) -> None:
    shell.run('%%memprofile --gpu T4 -o tape\ndevice = torch.device("cpu")\ntorch.ones(3, device=device)').raise_error()
    assert shell["tape"].meta.advice == 'device is "cpu" in this cell: write device = "cuda"'


def test_device_set_before_the_notebook_gpu_is_on(shell: Shell) -> None:
    shell.run(CHOICE).raise_error()
    shell.run("%memgpu T4").raise_error()
    shell.run(f"%%memprofile -o tape\n{TRAINING}").raise_error()
    assert shell["tape"].meta.advice == (
        "device is the CPU, set before the virtual Tesla T4 was on: run the cells above again"
    )


def test_explorer_is_not_shown_for_a_cell_without_the_gpu(shell: Shell, explored: list[object]) -> None:
    shell.run(CHOICE).raise_error()
    shell.run(f"%%memprofile --gpu T4 --explore\n{TRAINING}").raise_error()
    assert (len(explored), len(shell.shown)) == (0, 1)


@pytest.mark.parametrize("magic", ["%%memprofile --gpu T4 -o tape\n", "%memprofile --gpu T4 -o tape "])
def test_cell_that_raises_never_fits(shell: Shell, magic: str) -> None:
    assert shell.run(f'{magic}torch.ones(3, device="cuda").nope').error_in_exec is not None
    text = verdict_content(shell["tape"]).text
    assert text.startswith("Ended by an error: AttributeError: ")
    assert "fits" not in text.lower()
