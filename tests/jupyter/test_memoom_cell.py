"""What would have fitted, from the failed cell in a copy of its names."""

from __future__ import annotations

import pickle
from typing import Any

import pytest
import torch

from memexplore.analysis import curves
from memexplore.analysis.verdict_content import TIGHT
from memexplore.jupyter import memoom
from memexplore.out_of_memory.failed_program import FailedProgram
from memexplore.run.knobs.knobs import Knobs
from memexplore.run.machine import machine_of
from memexplore.run.programs.cell import Cell
from tests.jupyter.magics_shell import Shell

# Two models: each has 4 blocks that keep 3 * batch * 1024 * 4 bytes each.
TWO_MODELS = """
from torch import nn
def blocks():
    return nn.Sequential(*[nn.Sequential(nn.Linear(1024, 1024), nn.ReLU(), nn.GELU()) for _ in range(4)])
generator, critic = blocks().cuda(), blocks().cuda()
of_generator = torch.optim.Adam(generator.parameters())
of_critic = torch.optim.Adam(critic.parameters())
losses = []
"""
CELL = """
batch_size = 4096
for _ in range(3):
    noise = torch.randn(batch_size, 1024, device="cuda")
    loss = critic(generator(noise)).mean()
    losses.append(loss.item())
    loss.backward()
    of_generator.step()
    of_critic.step()
    of_generator.zero_grad()
    of_critic.zero_grad()
"""


@pytest.fixture
def on_gpu(shell: Shell, found: list[Any]) -> Shell:
    """A shell with a virtual GPU of 384 MiB and post-mortems."""
    shell.run("%memgpu 384MiB").raise_error()
    shell.run("%memoom on").raise_error()
    return shell


def state_of(names: Any) -> list[Any]:
    """What a run of the cell changes."""
    models = [names["generator"], names["critic"]]
    gradients = [weight.grad is None for model in models for weight in model.parameters()]
    return [list(names["losses"]), len(names["of_generator"].state), gradients, torch.get_rng_state().tolist()]


def test_settings_of_a_cell_with_two_models_are_run_and_applied(on_gpu: Shell, found: list[Any]) -> None:
    on_gpu.run(TWO_MODELS).raise_error()
    assert isinstance(on_gpu.run(CELL).error_in_exec, torch.OutOfMemoryError)
    before = state_of(on_gpu)
    on_gpu.run("%memoom advise").raise_error()
    assert state_of(on_gpu) == before
    what = found[-1]
    assert what.failed == ""
    assert what.assumed[0].startswith("The cell was run again from its first line, in a copy of the names")
    fields = [[*option.knobs.changed()] for option in what.options]
    assert fields[-1] == ["gpu"]
    # What earlier cells have left in this process lies otherwise than in a new one: what fits tightly there may not.
    spare = [TIGHT * option.outcome.capacity for option in what.options]
    margins = [option.outcome.margin for option in what.options]
    roomy = [one == ["checkpoint"] and left > least for one, left, least in zip(fields, margins, spare, strict=True)]
    on_gpu.run(f"%memoom apply {roomy.index(True) + 1}").raise_error()
    assert on_gpu.text.startswith("Applied to 2 models: Checkpointing ")
    on_gpu.run(CELL).raise_error()
    on_gpu.run("%memoom undo").raise_error()
    number = fields.index(["variables"])
    # 3072 samples under torch 2.13; where the blocks lie depends on the release
    assert 3000 < dict(what.options[number].knobs.variables)["batch_size"] < 4096
    on_gpu.run(f"%memoom apply {number + 1}").raise_error()
    assert on_gpu.text == f"Only the code can have {what.options[number].knobs}. Write the lines for it.\n"
    smaller = on_gpu.shell.rl_next_input
    assert smaller.splitlines()[1:] == CELL.strip().splitlines()[1:]
    on_gpu.run("loss = None\n%memoom free\nof_generator.zero_grad()\nof_critic.zero_grad()").raise_error()
    on_gpu.run(smaller).raise_error()


def step_after(shell: Shell, cell: str) -> FailedProgram | str:
    """The step that is known after a cell that runs out of memory."""
    assert isinstance(shell.run(cell).error_in_exec, torch.OutOfMemoryError)
    return memoom.of_shell(shell.shell).failed


def cell_after(shell: Shell, cell: str) -> tuple[Cell, FailedProgram]:
    """The cell that is searched after it has run out of memory."""
    step = step_after(shell, cell)
    assert isinstance(step, FailedProgram), step
    copy = pickle.loads(step.packed)
    assert isinstance(copy, Cell)
    return copy, step


TOO_LARGE = 'large = torch.empty(500 << 20, dtype=torch.uint8, device="cuda")'


def test_a_model_that_is_called_with_an_unknown_object(on_gpu: Shell) -> None:
    on_gpu.run(
        "class Batch:\n    size = 60000\n"
        "class Net(torch.nn.Linear):\n"
        "    def forward(self, batch):\n"
        "        return super().forward(torch.zeros(batch.size, 1024, device='cuda'))\n"
        "model = Net(1024, 1024).cuda()"
    ).raise_error()
    copy, step = cell_after(on_gpu, "model(Batch()).sum().backward()")
    assert [model() for model in step.models] == [on_gpu["model"]]
    on_gpu.run("%memgpu off").raise_error()
    execution = copy.execute(Knobs(), machine_of("80GiB"))
    # Input and output, 60000 × 1024 × 4 bytes each
    assert curves.peak(execution.tape)[0] > 2 * 60000 * 1024 * 4


def test_the_process_of_the_search_has_no_real_gpu(on_gpu: Shell) -> None:
    _, step = cell_after(on_gpu, TOO_LARGE)
    assert ("CUDA_VISIBLE_DEVICES", "") in step.settings.environment


def test_functions_of_the_notebook_see_the_variables_of_the_cell(on_gpu: Shell) -> None:
    on_gpu.run("def large():\n    return torch.empty(batch_size << 20, dtype=torch.uint8, device='cuda')").raise_error()
    copy, _ = cell_after(on_gpu, "batch_size = 500\nlarge()")
    on_gpu.run("%memgpu off").raise_error()
    smaller = copy.execute(Knobs(variables={"batch_size": 7}), machine_of("T4"))
    assert curves.peak(smaller.tape)[0] == 7 << 20


def test_tensors_of_earlier_cells_are_on_the_gpu_and_those_of_the_failed_run_are_not(on_gpu: Shell) -> None:
    on_gpu.run("data = [torch.zeros(3 << 20, dtype=torch.uint8, device='cuda')]").raise_error()
    copy, _ = cell_after(on_gpu, f"kept = data[0].clone()\n{TOO_LARGE}")
    on_gpu.run("%memgpu off").raise_error()
    execution = copy.execute(Knobs(), machine_of("T4"))
    # The data, its clone and the large tensor, each in blocks of 2 MiB or more
    assert curves.peak(execution.tape)[0] == (3 + 3 + 500) << 20


def test_names_that_the_cell_has_changed_are_as_they_were_or_named(on_gpu: Shell) -> None:
    on_gpu.run("size, parts, sizes = 250, [2], iter([1, 500])").raise_error()
    copy, step = cell_after(
        on_gpu,
        "size = size * 2\nparts = parts + [1]\nnext(sizes)\ntorch.empty(size << 20, dtype=torch.uint8, device='cuda')",
    )
    assert step.assumed[1:] == (
        "parts has the value that the cell has given it.",
        "sizes is where the cell has left it: the copy goes on from there.",
    )
    on_gpu.run("%memgpu off").raise_error()
    # Twice the size of before the cell, not of after it
    assert curves.peak(copy.execute(Knobs(), machine_of("T4")).tape)[0] == 500 << 20


def test_a_model_that_the_cell_wraps_is_the_one_of_before(on_gpu: Shell) -> None:
    on_gpu.run("model = inner = torch.nn.Linear(8, 8).cuda()").raise_error()
    # A wrapper of the wrapper has no weight.
    copy, step = cell_after(on_gpu, f"model.weight\nmodel = torch.nn.Sequential(model)\n{TOO_LARGE}")
    assert len(step.assumed) == 1
    on_gpu.run("%memgpu off").raise_error()
    assert curves.peak(copy.execute(Knobs(), machine_of("T4")).tape)[0] > 500 << 20


@pytest.mark.parametrize(
    ("cell", "reason"),
    [
        ("size = next(sizes)", "sizes, a generator, cannot be copied"),
        ("%time pass", "it has a magic or a shell command."),
        ("if 0: input()", "it reads from the keyboard."),
        ("import asyncio\nawait asyncio.sleep(0)", "it awaits."),
    ],
)
def test_a_cell_that_cannot_be_run_again_says_why(on_gpu: Shell, found: list[Any], cell: str, reason: str) -> None:
    on_gpu.run("sizes = (size for size in (1, 2))").raise_error()
    step = step_after(on_gpu, f"{cell}\n{TOO_LARGE}")
    assert isinstance(step, str)
    assert step.startswith(f"The cell cannot be run again: {reason}")
    assert step.endswith("Search with mx.advise(mx.Step(model, batch, loss, optimizer)).")
    on_gpu.run("%memoom advise").raise_error()
    assert found[-1].failed == step


def test_the_body_of_a_profiled_cell_is_run_again(shell: Shell, found: list[Any]) -> None:
    shell.run("%memoom on").raise_error()
    copy, _ = cell_after(shell, f"%%memprofile --gpu 256MiB\n{TOO_LARGE}")
    assert curves.peak(copy.execute(Knobs(), machine_of("T4")).tape)[0] == 500 << 20
