"""`%memcompare` and `%%memcompare` in an IPython shell; a virtual T4 stands for the GPU of this machine."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from IPython.core.error import UsageError

from memexplore.analysis.comparison import Comparison
from memexplore.run import comparing
from memexplore.run.machine import machine_of
from tests.jupyter.magics_shell import ONES, Shell


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(comparing, "default_name", lambda: "cuda")
    monkeypatch.setattr(comparing, "machine_of", lambda name: machine_of("T4"))
    monkeypatch.setattr(
        comparing, "DriverMemory", lambda device: SimpleNamespace(outside=lambda: SimpleNamespace(size=1 << 27))
    )


@pytest.mark.usefixtures("gpu")
def test_a_step_is_compared(shell: Shell) -> None:
    shell.run("import memexplore as mx\nimport torch\nlayer = torch.nn.Linear(8, 8)")
    result = shell.run("%memcompare mx.Step(layer, torch.zeros(4, 8), loss=torch.mean)")
    assert isinstance(result.result, Comparison)
    assert result.result.is_equal


@pytest.mark.usefixtures("gpu")
def test_a_cell_is_compared_in_a_copy_of_the_names(shell: Shell) -> None:
    shell.run("import torch")
    result = shell.run(f"%%memcompare\nx = {ONES}\nprint('printed')")
    assert result.result.requests == (1, 1)
    assert "x" not in shell.shell.user_ns
    assert "printed" not in shell.text


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("%memcompare", "%memcompare needs a step"),
        ("%memcompare 3", "%memcompare runs an mx.Step, and this is a int"),
        ("%%memcompare\nx = 1", "compare measures on the GPU of this machine"),
    ],
)
def test_what_cannot_be_compared_gets_one_sentence(shell: Shell, line: str, message: str) -> None:
    error = shell.run(line).error_in_exec
    assert isinstance(error, UsageError)
    assert message in str(error)


@pytest.mark.usefixtures("gpu")
def test_an_error_of_the_program_stays(shell: Shell) -> None:
    assert isinstance(shell.run("%%memcompare\nint('x')").error_in_exec, ValueError)
