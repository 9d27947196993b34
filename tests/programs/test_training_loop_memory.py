"""The memory of the training loop's knobs on a virtual GPU, in requested bytes.

The network is two linear layers without bias, of 1024 x 2048 and 2048 x 512 weights.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

from memexplore.analysis import curves
from memexplore.run.knobs.knobs import Knobs
from memexplore.run.machine import machine_of
from memexplore.run.programs.step import Step
from memexplore.run.run import run
from memexplore.tape import Action, Category, Phase, Tape
from tests.programs.test_training_loop import SGD
from tests.small_nets import everything, images, step_of

FIRST, SECOND = 1024 * 2048, 2048 * 512
WEIGHTS = FIRST + SECOND


def virtual_step(optimizer: Any = SGD, rows: int = 32) -> Step:
    model = nn.Sequential(nn.Linear(1024, 2048, bias=False), nn.ReLU(), nn.Linear(2048, 512, bias=False))
    return Step(model, (torch.zeros(rows, 1024), torch.zeros(rows, 512)), loss=functional.mse_loss, optimizer=optimizer)


def highest(tape: Tape, category: Category) -> int:
    """Return the peak of a category in requested bytes."""
    return int(curves.by_category(tape, "requested")[category].max())


def at_end_of_forward(tape: Tape, category: Category) -> int:
    """Return the requested bytes of a category at the start of the last backward pass."""
    (rows,) = ((tape.action == Action.MARK) & (tape.phase == Phase.BACKWARD) & (tape.step == 2)).nonzero()
    return int(curves.by_category(tape, "requested")[category][rows[0]])


@pytest.mark.parametrize(
    ("choice", "state"),
    [
        ("SGD", 0),
        ("SGD with momentum", 4 * WEIGHTS),
        ("Adam", 2 * 4 * WEIGHTS),
        ("AdamW", 2 * 4 * WEIGHTS),
        # A number a row and one a column of each weight; Linear's weight has shape (outputs, inputs).
        ("Adafactor", 4 * (2048 + 1024) + 4 * (512 + 2048)),
    ],
)
def test_state_of_the_optimizer(choice: str, state: int) -> None:
    tape = run(virtual_step(), Knobs(optimizer=choice)).tape
    assert highest(tape, Category.OPTIMIZER_STATE) == state
    assert highest(tape, Category.PARAMETER) == highest(tape, Category.GRADIENT) == 4 * WEIGHTS


def in_optimizer(tape: Tape) -> int:
    """Return the peak of temporaries in the optimizer in requested bytes."""
    here = tape.phase == Phase.OPTIMIZER
    return int(curves.by_category(tape, "requested")[Category.TEMPORARY][here].max())


@pytest.mark.parametrize(
    ("update", "scratch"),
    [
        # torch/optim/adam.py: the denominators of all weights at once.
        ("foreach", 4 * WEIGHTS),
        # Its single-tensor form divides the root by the correction before the root is gone: two copies of a weight.
        ("per tensor", 2 * 4 * FIRST),
        ("fused", 0),
    ],
)
def test_temporaries_of_adam(update: str, scratch: int) -> None:
    assert in_optimizer(run(virtual_step(), Knobs(optimizer="Adam", update=update)).tape) == scratch


def test_fused_sgd_needs_only_its_momentum() -> None:
    tape = run(virtual_step(), Knobs(optimizer="SGD with momentum", update="fused")).tape
    assert highest(tape, Category.OPTIMIZER_STATE) == 4 * WEIGHTS
    assert in_optimizer(tape) == 0


def test_a_step_in_backward_has_one_gradient_at_a_time() -> None:
    tape = run(virtual_step(), Knobs(update="in backward")).tape
    assert highest(tape, Category.GRADIENT) == 4 * FIRST
    assert set(tape.step[tape.action == Action.MARK].tolist()) == {1, 2}
    plain = run(virtual_step(), Knobs()).tape
    assert curves.peak(tape)[0] < curves.peak(plain)[0]


@pytest.mark.parametrize(("zero_grad", "gradients"), [("set to none", 0), ("set to zero", 4 * WEIGHTS)])
def test_gradients_in_the_second_forward(zero_grad: str, gradients: int) -> None:
    tape = run(virtual_step(), Knobs(zero_grad=zero_grad)).tape
    assert at_end_of_forward(tape, Category.GRADIENT) == gradients


def test_everything_in_bf16_has_two_bytes_a_number() -> None:
    tape = run(virtual_step(), Knobs(precision="all bf16", optimizer="Adam")).tape
    assert highest(tape, Category.PARAMETER) == highest(tape, Category.GRADIENT) == 2 * WEIGHTS
    assert highest(tape, Category.OPTIMIZER_STATE) == 2 * 2 * WEIGHTS
    assert highest(tape, Category.INPUT) == 2 * 32 * (1024 + 512)


def test_all_bf16_runs_where_fp32_weights_do_not_fit() -> None:
    # 1 GiB of weights in fp32, half of that in bf16, on a GPU with 0.75 GiB.
    model = nn.Sequential(*(nn.Linear(4096, 4096, bias=False) for _ in range(16)))
    step = Step(lambda: model, torch.zeros(1, 4096), loss=torch.mean, optimizer=SGD)
    tapes = {
        knobs: run(step, knobs, machine_of("768MiB")).tape
        for knobs in (Knobs(mode="inference"), Knobs(mode="inference", precision="all bf16"))
    }
    assert [Action.OOM in tape.action for tape in tapes.values()] == [True, False]


SQUARES, ONE = 4 * 64 * 512, 4
"""The loss, which mse_loss computes in the memory of all squares, and the gradient of 1 with which backward begins."""


def test_bf16_autocast_saves_half_of_the_activations() -> None:
    plain, lower = (run(virtual_step(rows=64), Knobs(precision=p)).tape for p in ("as written", "bf16"))
    # ReLU's result, and the output of 64 x 512 that mse_loss saves.
    assert at_end_of_forward(plain, Category.ACTIVATION) == 4 * 64 * 2048 + 4 * 64 * 512 + SQUARES + ONE
    # ReLU's result in bf16, the output back in fp32 for mse_loss; the cast input, for the gradient of the first weight,
    # and the cast second weight, for the gradient of ReLU's result.
    halves = 2 * 64 * 2048 + 2 * 64 * 1024 + 2 * SECOND
    assert at_end_of_forward(lower, Category.ACTIVATION) == halves + 4 * 64 * 512 + SQUARES + ONE


def test_fp16_has_a_scaler() -> None:
    result = run(virtual_step(), Knobs(precision="fp16"))
    # The loss times the scale is the only product of this step.
    assert "aten::mul" in result.tape.ops
    assert "aten::mul" not in run(virtual_step(), Knobs(precision="bf16")).tape.ops
    assert result.applied.texts == ("fp16 autocast with GradScaler",)


def test_micro_batches_divide_activations_and_inputs() -> None:
    whole, parts = (run(virtual_step(rows=64), Knobs(accumulation=n)).tape for n in (1, 4))
    assert highest(parts, Category.INPUT) * 4 == highest(whole, Category.INPUT) == 4 * 64 * (1024 + 512)
    assert at_end_of_forward(whole, Category.ACTIVATION) == 4 * 64 * (2048 + 512) + SQUARES + ONE
    # A micro-batch has a quarter of the samples. Its loss over 4 is a number of its own, and the squares are gone.
    assert at_end_of_forward(parts, Category.ACTIVATION) == 64 * (2048 + 512) + 4 + ONE


def test_offload_leaves_no_activation_at_the_end_of_forward() -> None:
    step = virtual_step(rows=64)
    tape = run(step, Knobs(offload="saved tensors on the CPU")).tape
    # The output, which mse_loss saves outside the model; ReLU's result is on the CPU.
    assert at_end_of_forward(tape, Category.ACTIVATION) == 4 * 64 * 512 + SQUARES + ONE


def test_frozen_layers_have_neither_gradients_nor_state() -> None:
    tape = run(virtual_step(), Knobs(frozen="0", optimizer="Adam")).tape
    assert highest(tape, Category.GRADIENT) == 4 * SECOND
    assert highest(tape, Category.OPTIMIZER_STATE) == 2 * 4 * SECOND


def test_only_adapters_have_gradients_and_state() -> None:
    tape = run(virtual_step(), Knobs(lora=("0", "2"), lora_rank=4, optimizer="Adam")).tape
    # rank x inputs and outputs x rank of each layer.
    adapters = 4 * (1024 + 2048) + 4 * (2048 + 512)
    assert highest(tape, Category.PARAMETER) == 4 * (WEIGHTS + adapters)
    assert highest(tape, Category.GRADIENT) == 4 * adapters
    assert highest(tape, Category.OPTIMIZER_STATE) == 2 * 4 * adapters


def test_inference_keeps_no_activation() -> None:
    tape = run(virtual_step(), Knobs(mode="inference")).tape
    assert highest(tape, Category.ACTIVATION) == highest(tape, Category.GRADIENT) == 0
    assert Phase.BACKWARD not in tape.phase


def test_channels_last_has_a_second_batch_only_during_the_conversion() -> None:
    model = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.ReLU())
    step = Step(model, torch.zeros(4, 3, 32, 32), loss=lambda output: output.mean(), optimizer=SGD)
    images = 4 * 4 * 3 * 32 * 32
    tape = run(step, Knobs(memory_format="channels last")).tape
    assert at_end_of_forward(tape, Category.INPUT) == images
    # Both batches, 8 x 3 x 3 x 3 weights and 8 biases, and the loss of the step before.
    between = tape.phase == Phase.OTHER
    assert curves.curve(tape, "requested")[between].max() == 2 * images + 4 * (8 * 27 + 8) + 4


@pytest.mark.parametrize(
    "knobs",
    [
        Knobs(),
        Knobs(precision="all bf16"),
        Knobs(memory_format="channels last"),
        Knobs(lora=""),
        Knobs(update="in backward"),
    ],
    ids=str,
)
def test_the_model_is_restored_after_a_run(knobs: Knobs) -> None:
    step = step_of(images, dtype=torch.float32)
    before = everything(step.model)
    run(step, knobs)
    assert everything(step.model) == before
