"""Knobs together on a model that is an `nn.Sequential`, whose own forward a checkpoint replaces."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import memexplore as mx
from memexplore.run.knobs.applying.apply import apply
from memexplore.run.knobs.knobs import Knobs
from tests.small_nets import flat

WORKSPACE = 8_519_680
"""Bytes of a cuBLAS workspace on a T4."""


# With "keep matmuls" the result of each matrix product is kept, and read again by the recomputed activation.
@pytest.mark.parametrize(("checkpoint", "number"), [("every 2", 3), ("sqrt", 3), ("keep matmuls", 0)])
def test_activations_run_in_place_in_a_checkpointed_sequential_model(checkpoint: str, number: int) -> None:
    model = flat()
    with apply(Knobs(inplace="on", checkpoint=checkpoint), model) as report:
        model(torch.ones(2, 8)).sum().backward()
        assert f"In-place at {number} of 3 activations" in report.completed().texts
        assert sum(model[position].inplace for position in (1, 3, 5)) == number
    assert not any(model[position].inplace for position in (1, 3, 5))


def test_saved_tensors_are_offloaded_in_a_checkpointed_sequential_model() -> None:
    with mx.virtual("T4", release="2.13"):
        model = nn.Sequential(*(nn.Linear(1024, 1024, bias=False) for _ in range(4))).cuda()
        x = torch.ones(1024, 1024, device="cuda")
        before = torch.cuda.memory_allocated()
        with apply(Knobs(checkpoint="every 1", offload="saved tensors on the CPU"), model):
            output = model(x)
            # The checkpoints keep the input of each layer on the CPU: the model's result of 4 MiB is on the GPU.
            assert torch.cuda.memory_allocated() - before == 4 * 1024**2 + WORKSPACE
            output.sum().backward()


@pytest.mark.parametrize("checkpoint", ["every 1", "sqrt"])
def test_a_checkpointed_sequential_model_takes_its_input_by_name(checkpoint: str) -> None:
    model, x = flat(), torch.ones(2, 8)
    expected = model(x)
    with apply(Knobs(checkpoint=checkpoint), model):
        assert torch.equal(model(input=x), expected)
