"""Settings of a cell in a copy of its names: those of the answer fit, and the names stay as they were."""

from __future__ import annotations

import time
from typing import Any

import cloudpickle
import pytest
import torch

from memexplore.analysis import curves
from memexplore.run.knobs.knobs import Knobs
from memexplore.run.machine import machine_of
from memexplore.run.programs.cell import Cell
from memexplore.run.programs.limit import FailureLimit
from memexplore.run.programs.names import PackedNames
from memexplore.run.programs.out_of_memory import fits
from memexplore.run.run import Want, run
from memexplore.run.search.advice import Advice
from memexplore.run.search.loop_search import LoopSearch
from memexplore.run.search.runners import OneByOne
from memexplore.run.search.searching import run_all

MIB = 1 << 20
# Two models of 4 blocks: 16 MiB of weights, as much of gradients, and the inputs of 8 blocks of 4 KiB a sample each.
CELL = """
import torch
from torch import nn
def blocks():
    return nn.Sequential(*[nn.Sequential(nn.Linear(1024, 1024), nn.GELU()) for _ in range(4)])
first, second = blocks().cuda(), blocks().cuda()
optimizer = torch.optim.SGD([*first.parameters(), *second.parameters()], lr=0.1)
batch_size = 2000
for epoch in range(4):
    seen.append(epoch)
    second(first(torch.randn(batch_size, 1024, device="cuda"))).mean().backward()
    optimizer.step()
    optimizer.zero_grad()
"""


def copy_of(code: str, limit: FailureLimit | None = None, **values: Any) -> Cell:
    return Cell(code, PackedNames(cloudpickle.dumps(values), limit or FailureLimit()))


def searched(cell: Cell, gpu: str) -> Advice:
    machine = machine_of(gpu)
    search = LoopSearch(cell, machine)
    for _ in run_all(search, OneByOne(cell, machine, Want.TAPE)):
        pass
    advice = search.advice()
    assert advice is not None
    return advice


def test_every_setting_of_the_answer_fits_and_the_next_larger_batch_does_not() -> None:
    cell = copy_of(CELL, seen=[])
    advice = searched(cell, "192MiB")
    assert not advice.fits
    settings = [option.knobs for option in advice.options]
    assert {"checkpoint", "variables", "gpu"} <= {field for knobs in settings for field in knobs.changed()}
    # The smallest change first: the same training, then a smaller batch, then another GPU.
    changes = [option.alters for option in advice.options[:-1]]
    assert changes == sorted(changes)
    assert settings[-1].gpu is not None
    for knobs in settings:
        assert fits(run(cell, knobs, machine_of("192MiB")).tape), knobs
    ((name, largest),) = next(knobs.variables for knobs in settings if knobs.variables)
    assert name == "batch_size"
    assert not fits(run(cell, Knobs(variables={name: largest + 1}), machine_of("192MiB")).tape)


def test_the_code_of_a_smaller_batch_is_the_cell() -> None:
    (option,) = [one for one in searched(copy_of(CELL, seen=[]), "192MiB").options if one.knobs.variables]
    assert option.code == CELL.strip("\n").replace("2000", str(option.knobs.variables[0][1]))
    assert "noisier" in option.training
    assert "the largest that fits" in str(option)


def test_the_batch_of_a_data_loader_is_cut_and_made_smaller() -> None:
    data = "data = torch.utils.data.TensorDataset(torch.randn(4000, 1024))\n"
    loop = "for (x,) in torch.utils.data.DataLoader(data, batch_size=2000):"
    code = CELL.replace("batch_size = 2000\n", data).replace("for epoch in range(4):\n    seen.append(epoch)", loop)
    advice = searched(copy_of(code.replace('torch.randn(batch_size, 1024, device="cuda")', "x.cuda()")), "192MiB")
    settings = [option.knobs for option in advice.options]
    assert Knobs(accumulation=2) in settings
    (largest,) = [option for option in advice.options if option.knobs.batch]
    assert 1000 < largest.knobs.batch < 2000  # type: ignore[operator]
    assert f"batch_size={largest.knobs.batch}" in largest.code
    assert largest.training.startswith(f"A step of {largest.knobs.batch} samples has a noisier gradient")


def test_a_cell_that_fits_is_run_once() -> None:
    advice = searched(copy_of(CELL, seen=[]), "T4")
    assert [str(option.knobs) for option in advice.options] == ["as written"]
    assert len(advice.tried) == 1


def test_a_run_ends_some_updates_after_the_one_that_failed() -> None:
    cell = copy_of(CELL.replace("range(4)", "range(100)"), seen=[])
    assert not fits(cell.execute(Knobs(), machine_of("192MiB")).tape)
    assert int(cell.execute(Knobs(), machine_of("T4")).tape.step.max()) <= 2 + 4


@pytest.mark.parametrize("line", ["torch.zeros(8, device='cuda')", "pass"], ids=["gpu", "cpu"])
def test_a_run_that_takes_too_long_is_an_error(line: str) -> None:
    cell = copy_of(f"import torch\nwhile True: {line}", FailureLimit(1.0))
    with pytest.raises(TimeoutError, match="for 1 s without an end"):
        searched(cell, "T4")


class _Slow:
    """An object whose copy takes longer than a run may, and then allocates."""

    def __reduce__(self) -> Any:
        return _made_slowly, ()


def _made_slowly() -> torch.Tensor:
    end = time.monotonic() + 1.1
    while time.monotonic() < end:
        pass
    return torch.zeros(8, device="cuda")


def test_names_that_take_too_long_to_copy_are_an_error() -> None:
    with pytest.raises(TimeoutError, match="for 1 s without an end"):
        copy_of("pass", FailureLimit(1.0), slow=_Slow()).execute(Knobs(), machine_of("T4"))


def test_each_run_begins_with_a_new_copy() -> None:
    cell = copy_of("import torch\nx = torch.zeros(next(sizes), device='cuda')", sizes=iter([1 << 20, 1 << 22]))
    assert {curves.peak(cell.execute(Knobs(), machine_of("T4")).tape)[0] for _ in range(2)} == {4 * MIB}


def test_the_error_of_the_cell_is_raised() -> None:
    with pytest.raises(NameError, match="unknown"):
        searched(copy_of("unknown + 1"), "T4")
