"""Real models on the virtual GPU: parameters, gradients and optimizer state to the byte; no step leaks a byte."""

from __future__ import annotations

import os
import time
from typing import NamedTuple

import pytest
import torch
from torch import nn

import memexplore as mx
from memexplore.tape import Action, Category
from tests.models import MODELS

pytest.importorskip("transformers")

NAMES = ["unet", "lenet", "resnet50", "vit", "bert", "gpt2", "llama", "lstm"]
MIB = 1024**2


def rounded(size: int) -> int:
    """A small request is a multiple of 512 bytes.

    >>> rounded(1), rounded(512), rounded(513)
    (512, 512, 1024)
    """
    return -(-size // 512) * 512


class Run(NamedTuple):
    tape: mx.Tape
    parameters: list[int]
    """Bytes of each parameter, tied parameters once."""
    trained: list[int]
    """Bytes of each parameter with a gradient."""
    buffers: list[int]
    allocated: list[int]
    """`memory_allocated()` after each step, after gradients and batch were freed."""
    requested: list[int]
    """Requested bytes at the same points."""
    outcome: str


def run(name: str, steps: int = 3, gpu: str = "T4", optimizer: type[torch.optim.Optimizer] = torch.optim.Adam) -> Run:
    build, batch, loss_of = MODELS[name]
    noted: dict[str, list[int]] = {name: [] for name in Run._fields[1:-1]}

    def train() -> None:
        model = build().to("cuda")
        trainer = optimizer(model.parameters(), lr=1e-3)
        noted["parameters"] = [parameter.nbytes for parameter in model.parameters()]
        noted["buffers"] = [buffer.nbytes for buffer in model.buffers()]
        for _ in range(steps):
            loss = loss_of(model, batch("cuda"))
            loss.backward()
            trainer.step()
            noted["trained"] = [parameter.nbytes for parameter in model.parameters() if parameter.grad is not None]
            trainer.zero_grad()
            del loss
            noted["allocated"].append(torch.cuda.memory_allocated())
            noted["requested"].append(torch.cuda.memory_stats()["requested_bytes.all.current"])

    # From torch 2.15 on a matrix product frees its workspace: these tests use the rules of one release.
    tape = mx.simulate(train, gpu=gpu, release="2.13")
    outcome = "oom" if (tape.action == Action.OOM).any() else "fits"
    return Run(tape, **noted, outcome=outcome)


@pytest.fixture(scope="module")
def runs() -> dict[str, Run]:
    return {}


@pytest.fixture(params=NAMES)
def trained(request: pytest.FixtureRequest, runs: dict[str, Run]) -> Run:
    if request.param not in runs:
        runs[request.param] = run(request.param)
    return runs[request.param]


def _requested(tape: mx.Tape, category: Category, step: int | None = None) -> list[int]:
    """Return the bytes of the blocks of a category, in one step or in all."""
    chosen = (tape.action == Action.ALLOC) & (tape.category == category)
    if step is not None:
        chosen &= tape.step == step
    return sorted(tape.size[chosen].tolist())


def test_three_steps_run(trained: Run) -> None:
    assert trained.outcome == "fits"
    assert len(trained.allocated) == 3
    assert trained.tape.step.max() == 3


def blocks(tape: mx.Tape, sizes: list[int]) -> list[int]:
    """Return the bytes of the blocks of parameters of these sizes, or of their gradients."""
    if "aten::_cudnn_rnn_flatten_weight" not in tape.ops:
        return sorted(sizes)
    # cuDNN keeps all weights of an LSTM in one block, and their gradients too: here 2 layers of 4 tensors.
    return sorted([sizes[0], sum(sizes[1:9]), *sizes[9:]])


def test_parameters_to_the_byte(trained: Run) -> None:
    assert _requested(trained.tape, Category.PARAMETER) == blocks(trained.tape, trained.parameters)


def test_buffers_to_the_byte(trained: Run) -> None:
    assert _requested(trained.tape, Category.BUFFER) == sorted(size for size in trained.buffers if size)


def test_gradients_of_a_step_to_the_byte(trained: Run) -> None:
    assert _requested(trained.tape, Category.GRADIENT, step=2) == blocks(trained.tape, trained.trained)


def test_adam_keeps_two_states_per_trained_parameter(trained: Run) -> None:
    # exp_avg and exp_avg_sq on the GPU, the step counter on the CPU: torch/optim/adam.py, _init_group
    assert _requested(trained.tape, Category.OPTIMIZER_STATE) == sorted(2 * trained.trained)


def test_memory_is_the_same_after_every_step(trained: Run) -> None:
    first, second, third = trained.allocated
    assert first == second == third


CUBLAS = 2 * 4 * MIB + 8 * 16 * 1024
"""One cuBLAS workspace on compute capability 7.5; a model with matrix products has one for each pass."""


def test_requested_bytes_after_a_step_are_the_sum_of_all_tensors(trained: Run) -> None:
    workspaces = 2 * CUBLAS if "aten::addmm" in trained.tape.ops or "aten::mm" in trained.tape.ops else 0
    kept = sum(trained.parameters) + sum(trained.buffers) + 2 * sum(trained.trained)
    assert trained.requested[-1] == kept + workspaces


def test_allocated_bytes_after_a_step_are_the_rounded_sum(trained: Run) -> None:
    workspaces = 2 * CUBLAS if "aten::addmm" in trained.tape.ops or "aten::mm" in trained.tape.ops else 0
    kept = [*trained.parameters, *trained.buffers, *trained.trained, *trained.trained]
    exact = sum(map(rounded, kept)) + workspaces
    # A block of the large pool keeps a rest of up to 1 MiB: should_split in the allocator
    large = sum(size > MIB for size in kept) + bool(workspaces) * 2
    assert 0 <= trained.allocated[-1] - exact <= large * MIB


@pytest.mark.parametrize(
    ("optimizer", "states"), [(torch.optim.SGD, 0), (torch.optim.RMSprop, 1), (torch.optim.AdamW, 2)]
)
def test_optimizers_keep_the_states_of_their_formula(optimizer: type[torch.optim.Optimizer], states: int) -> None:
    done = run("lenet", steps=1, optimizer=optimizer)
    assert _requested(done.tape, Category.OPTIMIZER_STATE) == sorted(states * done.trained)


def test_bytes_of_lenet() -> None:
    done = run("lenet", steps=1)
    # 6*1*5*5 + 6, 16*6*5*5 + 16, 120*400 + 120, 84*120 + 84, 10*84 + 10 numbers of 4 bytes
    numbers = [150, 6, 2400, 16, 48000, 120, 10080, 84, 840, 10]
    assert done.parameters == [4 * count for count in numbers]
    # 61_706 parameters, each with two states of Adam: 12 bytes a number beside the gradient
    assert sum(done.parameters) + sum(_requested(done.tape, Category.OPTIMIZER_STATE)) == 61_706 * 12


def test_tied_weights_count_once() -> None:
    done = run("gpt2", steps=1)
    # GPT-2 small has 124_439_808 parameters with the head tied to the embedding
    assert sum(done.parameters) == 124_439_808 * 4


def _resident() -> int:
    """Return the resident bytes of this process."""
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


@pytest.mark.skipif(not os.path.exists("/proc/self/statm"), reason="reads /proc")
def test_a_seven_billion_parameter_model_is_built_and_trained_for_a_step() -> None:
    before, start = _resident(), time.thread_time()
    done = run("llama7b", steps=1, gpu="192GiB", optimizer=torch.optim.AdamW)
    assert done.outcome == "fits"
    # Llama-2-7B: 6_738_415_616 parameters, 4 bytes each, twice again for AdamW
    assert sum(done.parameters) == 6_738_415_616 * 4
    assert sum(_requested(done.tape, Category.OPTIMIZER_STATE)) == 6_738_415_616 * 8
    assert _resident() - before < 1024 * MIB
    assert time.thread_time() - start < 120


def test_a_seven_billion_parameter_model_does_not_fit_a_t4() -> None:
    assert run("llama7b", steps=1).outcome == "oom"


def test_a_cpu_module_keeps_its_values_while_a_virtual_gpu_is_on() -> None:
    with mx.virtual("T4"):
        real, moved = nn.Linear(4, 4), nn.Linear(4, 4).cuda()
        assert real(torch.ones(1, 4)).isfinite().all()
        assert moved(torch.ones(1, 4, device="cuda")).is_cuda
