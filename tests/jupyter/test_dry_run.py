"""`%%memprofile --dry-run`: the cell runs in a copy of the names and on the virtual GPU only."""

from __future__ import annotations

import pytest
import torch
from IPython.core.error import UsageError

from memexplore.analysis.curves import peak
from memexplore.jupyter import dry_run
from memexplore.run.programs import names
from tests.jupyter.magics_shell import BLOCK, ONES, Shell
from tests.real_gpu import stand_in

MIB = 1 << 20
TRAIN = """
model = torch.nn.Linear(256, 256).cuda()
optimizer = torch.optim.SGD(model.parameters())
for _ in range(3):
    model(torch.zeros(8, 256, device="cuda")).sum().backward()
    optimizer.step()
"""


def test_no_variable_is_made_or_changed(shell: Shell) -> None:
    shell.run("x = 1")
    shell.run(f"%%memprofile --dry-run --gpu T4 -o tape\nx = {ONES}\ny = 3\nprint('printed')\n40 + 2").raise_error()
    assert shell["x"] == 1
    assert "y" not in shell.shell.user_ns
    assert shell.text.startswith("Dry run, no variable was changed. Fits: needs 20.0 MiB · T4 has 14.4 GiB · ")
    assert "printed" not in shell.text
    assert (peak(shell["tape"])[0], shell["tape"].meta.device) == (BLOCK, "Tesla T4")
    assert shell.shown == [shell["tape"]]


def test_a_model_of_an_earlier_cell_is_as_before(shell: Shell) -> None:
    shell.run("torch.manual_seed(0)\nlayer = torch.nn.Linear(8, 8)\noptimizer = torch.optim.Adam(layer.parameters())")
    before = shell["layer"].weight.clone()
    state = torch.get_rng_state()
    shell.run(
        "%%memprofile --dry-run --gpu T4\nlayer.cuda()(torch.rand(4, 8).cuda()).sum().backward()\noptimizer.step()"
    ).raise_error()
    layer = shell["layer"]
    assert layer.weight.device.type == "cpu"
    assert torch.equal(layer.weight, before)
    assert layer.weight.grad is None
    assert not shell["optimizer"].state
    assert torch.equal(torch.get_rng_state(), state)


def test_a_cell_that_does_not_fit_says_what_is_missing_and_where_it_stops(shell: Shell) -> None:
    code = '%%memprofile --dry-run --gpu 1GiB -o tape\nx = 1\ny = torch.empty(1 << 30, device="cuda")\nz = y.exp()'
    shell.run(code).raise_error()
    lines = shell.text.splitlines()
    # 4 GiB for each of two tensors
    assert lines[0] == (
        "Dry run, no variable was changed. Needs 8.00 GiB · the GPU has 1.00 GiB · 7.00 GiB over"
        " · stops (aten::empty, 4.00 GiB)"
    )
    assert lines[1].endswith('line 3: y = torch.empty(1 << 30, device="cuda")')
    assert peak(shell["tape"].whole)[0] == 8 << 30


def test_variables_of_the_real_gpu_that_do_not_fit_are_the_answer(
    shell: Shell, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The CPU stands for the real GPU.
    monkeypatch.setattr(names, "_is_on_real_gpu", lambda value: isinstance(value, torch.Tensor))
    shell.run("ballast = torch.zeros(30 << 18)")
    shell.run(f"%%memprofile --dry-run --gpu 24MiB -o tape\nx = {ONES}").raise_error()
    lines = shell.text.splitlines()
    # 30 MiB of variables, 20 of the cell
    assert lines[0].startswith(
        "Dry run, no variable was changed. Needs 50.0 MiB · the GPU has 24.0 MiB · 26.0 MiB over · stops"
    )
    assert lines[1] == "The notebook's variables alone need 30.0 MiB, and do not fit: the cell did not run."
    assert shell.shown == [shell["tape"]]


def test_a_loop_that_fills_the_gpu_ends(shell: Shell) -> None:
    shell.run(
        "%%memprofile --dry-run --gpu 20MiB\nkept = []\nwhile True: kept.append(torch.zeros(1 << 18, device='cuda'))"
    ).raise_error()
    assert "stops (aten::zeros" in shell.text
    assert "kept" not in shell.shell.user_ns


def test_a_long_cell_ends_after_some_steps(shell: Shell, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dry_run, "_SECONDS", 0.0)
    shell.run(f"%%memprofile --dry-run --gpu T4 -o tape\n{TRAIN.replace('range(3)', 'range(1000)')}").raise_error()
    assert "Fits: needs " in shell.text
    assert "The dry run was ended after 3 optimizer steps, 0 s: later ones did not run." in shell.text


def test_an_error_of_the_cell_is_raised_with_its_line(shell: Shell) -> None:
    result = shell.run("%%memprofile --dry-run --gpu T4\nx = 1\n1 / 0")
    assert isinstance(result.error_in_exec, ZeroDivisionError)
    assert "----> 3 1 / 0" in shell.text or "line 3" in shell.text


def test_a_syntax_error_is_that_of_the_cell(shell: Shell) -> None:
    result = shell.run("%%memprofile --dry-run --gpu T4\nx = (\n")
    assert isinstance(result.error_in_exec, SyntaxError)


def test_a_statement_can_be_tried(shell: Shell) -> None:
    shell.run(f"%memprofile --dry-run --gpu T4 x = {ONES}").raise_error()
    assert "x" not in shell.shell.user_ns
    assert "Fits: needs 20.0 MiB" in shell.text


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("--dry-run --explore", "shows no controls"),
        ("--dry-run --live", "shows no controls"),
        ("--dry-run --values real", "remove --values"),
        ("--dry-run --gpu cpu", "name one such as T4"),
        ("--dry-run --gpu nope", "no GPU 'nope'"),
        ("--dry-run x = 1", "takes options only"),
    ],
)
def test_other_options_are_refused(shell: Shell, line: str, message: str) -> None:
    result = shell.run(f"%%memprofile {line}\nx = 1")
    assert isinstance(result.error_in_exec, UsageError)
    assert message in str(result.error_in_exec)
    assert "x" not in shell.shell.user_ns


def test_the_virtual_gpu_of_the_notebook_is_refused(shell: Shell) -> None:
    shell.run("%memgpu T4").raise_error()
    try:
        error = shell.run("%%memprofile --dry-run --gpu A10\nx = 1").error_in_exec
    finally:
        shell.run("%memgpu off").raise_error()
    assert isinstance(error, UsageError)
    assert "run %memgpu off first" in str(error)


def test_without_a_name_it_is_the_real_gpu_as_it_is_now(shell: Shell, monkeypatch: pytest.MonkeyPatch) -> None:
    stand_in(monkeypatch)
    shell.run(f"%%memprofile --dry-run\nx = {ONES}").raise_error()
    # 300 MiB free, and 100 - 30 in the cache of this process
    assert "Fits: needs 20.0 MiB · this GPU has 370 MiB · 350 MiB to spare" in shell.text
