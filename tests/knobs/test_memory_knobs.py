"""Memory format, offload, recomputed norms and inference: strides, and bytes on a virtual GPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import memexplore as mx
from memexplore.run.knobs.applying.apply import apply
from memexplore.run.knobs.applying.forward import run_forward_inside
from memexplore.run.knobs.applying.undo import UndoLog, undone_after
from memexplore.run.knobs.knobs import Knobs
from tests.small_nets import Deep, flat, gradients, images, step_of


def test_channels_last_changes_weights_and_inputs() -> None:
    model, seen = images(), []
    model[0].register_forward_pre_hook(lambda _, args: seen.append(args[0].stride()))
    with apply(Knobs(memory_format="channels last"), model) as applied:
        assert model[0].weight.is_contiguous(memory_format=torch.channels_last)
        model(torch.zeros(2, 3, 4, 5))
    # (H * W * C, 1, W * C, C) for shape (2, 3, 4, 5).
    assert seen == [(60, 1, 15, 3)]
    assert applied.texts == ("channels last",)


def test_a_note_says_that_channels_last_changes_no_weight() -> None:
    with apply(Knobs(memory_format="channels last"), flat()) as applied:
        assert applied.notes


def test_offload_on_a_cpu_moves_no_tensor() -> None:
    model = flat()
    with apply(Knobs(offload="saved tensors on the CPU"), model) as applied:
        assert "forward" not in model.__dict__
    assert applied.notes == ("The model is on the CPU: no tensor had to be moved there.",)


def test_offload_keeps_saved_tensors_on_the_cpu() -> None:
    with mx.virtual("T4", release="2.13"):
        model = nn.Sequential(*(nn.Linear(1024, 1024, bias=False) for _ in range(4))).cuda()
        x = torch.ones(1024, 1024, device="cuda")
        before = torch.cuda.memory_allocated()
        with apply(Knobs(offload="saved tensors on the CPU"), model):
            output = model(x)
        # Of four results of 4 MiB the last one, which no op saves, is on the GPU, and the cuBLAS workspace.
        assert torch.cuda.memory_allocated() - before == 4 * 1024**2 + 8_519_680
        output.sum().backward()


UNIT, WEIGHT, STATISTIC, SCALE = 8192 * 64 * 4, 64 * 64 * 4, 8192 * 4, 512
"""Bytes of a result of the network below for its batch, of a Linear's weight, of a mean for each row, and of a
LayerNorm's 64 weights in a block."""
WORKSPACE = 8_519_680
"""Bytes of a cuBLAS workspace on a T4."""


NORMS, OFFLOAD = Knobs(checkpoint="norms"), Knobs(offload="saved tensors on the CPU")
BOTH = Knobs(checkpoint="norms", offload="saved tensors on the CPU")


@pytest.mark.parametrize(
    ("knobs", "release", "alive", "peak"),
    [
        # Three times the result of Linear, and the model's result. The peak of the backward pass is at the second
        # Linear from the end: two results of Linear, the model's result, a gradient, its own two gradients, and
        # LayerNorm's and GELU's recomputed results, with mean and deviation.
        (NORMS, "2.13", 4 * UNIT, (4 + 1 + 2) * UNIT + WEIGHT + 2 * STATISTIC),
        # From torch 2.15 on each matrix product takes a workspace; until 2.14 a thread kept it from its first one.
        (NORMS, "2.15", 4 * UNIT, (4 + 1 + 2) * UNIT + WEIGHT + 2 * STATISTIC + WORKSPACE),
        # The model's result. LayerNorm's backward: its input, mean, deviation and weights come back, two gradients.
        (OFFLOAD, "2.13", UNIT, (1 + 1 + 2) * UNIT + 2 * STATISTIC + 4 * SCALE),
        # Linear's backward: a workspace, the model's result, a gradient, input and weight come back, two gradients.
        (OFFLOAD, "2.15", UNIT, WORKSPACE + (1 + 1 + 1 + 1) * UNIT + 2 * WEIGHT),
        # GELU's backward: LayerNorm's input comes back and LayerNorm runs again; two gradients.
        (BOTH, "2.13", UNIT, (1 + 2 + 2) * UNIT + 2 * STATISTIC),
        # Linear's backward, as without recomputed norms.
        (BOTH, "2.15", UNIT, WORKSPACE + (1 + 1 + 1 + 1) * UNIT + 2 * WEIGHT),
    ],
    ids=str,
)
def test_memory_of_recomputed_norms_and_offload(knobs: Knobs, release: str, alive: int, peak: int) -> None:
    with mx.virtual("T4", release=release):
        rows = ((nn.Linear(64, 64, bias=False), nn.LayerNorm(64), nn.GELU()) for _ in range(3))
        model = nn.Sequential(*(layer for row in rows for layer in row)).cuda()
        x, gradient = torch.ones(2, 8192, 64, device="cuda")
        model(x).backward(gradient)  # allocates gradients and workspaces
        before = torch.cuda.memory_allocated()
        with apply(knobs, model):
            output = model(x)
            assert torch.cuda.memory_allocated() - before == alive
            torch.cuda.reset_peak_memory_stats()
            output.backward(gradient)
        assert torch.cuda.max_memory_allocated() - before == peak


@pytest.mark.parametrize("make", [Deep, flat, images])
def test_recomputed_norms_read_tensors_that_hooks_have_moved(make: Any) -> None:
    step = step_of(make)
    loss, before = gradients(step, step.model)
    again, packed = step_of(make), []

    def moved(tensor: torch.Tensor) -> torch.Tensor:
        packed.append(tensor.shape)
        return tensor.detach().clone()

    def copy_saved_tensors(log: UndoLog) -> None:
        # On a CPU `save_on_cpu` moves nothing: hooks that copy stand for it.
        run_forward_inside(
            log, again.model, lambda: torch.autograd.graph.saved_tensors_hooks(moved, lambda tensor: tensor)
        )

    with undone_after(copy_saved_tensors), apply(Knobs(checkpoint="norms"), again.model):
        changed, after = gradients(again, again.model)
    assert packed
    assert torch.equal(changed, loss)
    torch.testing.assert_close(after, before, rtol=0, atol=0)


def test_inference_mode_has_no_gradients_and_no_dropout() -> None:
    model = Deep()
    x = torch.randn(4, 8)
    with apply(Knobs(mode="inference"), model):
        assert not any(module.training for module in model.modules())
        output = model(x)
    assert not output.requires_grad
    torch.testing.assert_close(output, model.eval()(x).detach())
