"""The precision knob: autocast, no autocast, and a model in bf16 whose training is kept."""

from __future__ import annotations

import copy
import functools

import pytest
import torch
from torch import nn

from memexplore.run.knobs.applying.apply import apply
from memexplore.run.knobs.knobs import Knobs
from tests.small_nets import flat, gradients, images, step_of


@pytest.mark.parametrize(("precision", "dtype"), [("bf16", torch.bfloat16), ("fp16", torch.float16)])
def test_forward_runs_under_autocast(precision: str, dtype: torch.dtype) -> None:
    step = step_of(flat, dtype=torch.float32)
    loss, before = gradients(step, step.model)
    with apply(Knobs(precision=precision), step.model) as applied:
        assert step.model(step.batch[0]).dtype is dtype
        assert not torch.is_autocast_enabled("cpu")
        lower, after = gradients(step, step.model)
    assert applied.texts == (f"{precision} autocast",)
    # bf16 has 8 bits, so each of the four layers is off by 2**-8 at most; gradients pass them twice.
    torch.testing.assert_close(lower.float(), loss, rtol=4 * 2**-8, atol=4 * 2**-8)
    torch.testing.assert_close(after, before, rtol=8 * 2**-8, atol=8 * 2**-8)


def test_a_note_says_that_fp16_needs_a_grad_scaler() -> None:
    with apply(Knobs(precision="fp16"), flat()) as applied:
        assert [note for note in applied.notes if 'GradScaler("cpu")' in note]


def test_off_disables_every_autocast_in_forward() -> None:
    class Casting(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(2, 2)

        @torch.autocast("cpu", dtype=torch.bfloat16)
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            with torch.amp.autocast("cpu"):
                return self.inner(x)

    model, x = Casting(), torch.ones(1, 2)
    # A new context each time: one `torch.autocast` entered twice restores what its second entry found.
    autocast = functools.partial(torch.autocast, "cpu", torch.bfloat16)
    with autocast(), apply(Knobs(precision="off"), model), autocast():
        assert model(x).dtype is torch.float32
        # A part called by other code is outside the model's forward.
        assert model.inner(x).dtype is torch.bfloat16
    with autocast():
        assert model(x).dtype is torch.bfloat16


def test_all_bf16_casts_weights_buffers_and_inputs() -> None:
    model = images()
    with apply(Knobs(precision="all bf16"), model):
        floating = [tensor.dtype for tensor in model.state_dict().values() if tensor.is_floating_point()]
        assert set(floating) == {torch.bfloat16}
        assert model[1].num_batches_tracked.dtype is torch.int64
        assert model(torch.zeros(2, 3, 4, 4)).dtype is torch.bfloat16
        assert model(input=torch.zeros(2, 3, 4, 4)).dtype is torch.bfloat16


def test_weights_trained_in_all_bf16_are_kept_after_the_block() -> None:
    model = nn.Linear(4, 2)
    lower = copy.deepcopy(model).bfloat16()
    x = torch.randn(8, 4)

    def train(net: nn.Module, inputs: torch.Tensor) -> None:
        optimizer = torch.optim.SGD([net.weight], lr=0.1)
        for _ in range(3):
            net(inputs).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()

    bias = model.bias.clone()
    with apply(Knobs(precision="all bf16"), model):
        train(model, x)
    train(lower, x.bfloat16())
    assert model.weight.dtype is torch.float32
    moved = lower.weight != model.weight.bfloat16()
    assert not moved.any()
    # The optimizer did not train the bias: all its 24 bits are restored, not the 8 of bf16.
    assert torch.equal(model.bias, bias)
    assert not torch.equal(bias, bias.bfloat16().float())


def test_an_optimizer_made_before_all_bf16_trains_the_same_tensors() -> None:
    model = nn.Linear(4, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    before = model.weight.clone()
    with apply(Knobs(precision="all bf16"), model):
        model(torch.ones(1, 4)).sum().backward()
        optimizer.step()
    # The gradient of a sum over one sample of ones is 1 everywhere; bf16 rounds to 8 bits.
    torch.testing.assert_close(model.weight, before - 1, rtol=2**-8, atol=2**-8)
    assert model.weight.grad.dtype is torch.float32
