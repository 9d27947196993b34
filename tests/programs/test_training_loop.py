"""The knobs of the training loop, trained for real on the CPU beside loops written by hand."""

from __future__ import annotations

import copy
import dataclasses
import functools
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

from memexplore.run.knobs.applying.apply import apply, of_model_in_loop
from memexplore.run.knobs.knobs import Knobs
from memexplore.run.knobs.optimizer import KINDS
from memexplore.run.programs.optimizers import make
from memexplore.run.programs.step import Step
from memexplore.run.programs.training_loop import train
from tests.small_nets import Deep, everything, flat, gradients, images, step_of

SGD = functools.partial(torch.optim.SGD, lr=0.1)


def trained(step: Step, knobs: Knobs, steps: int = 3) -> dict[str, torch.Tensor]:
    """Return the model's state after some steps of real training; the random numbers are the same in every call."""
    torch.manual_seed(1)
    with apply(of_model_in_loop(knobs), step.model):
        train(step, knobs, step.model, range(steps), [])
    return {name: value.clone() for name, value in step.model.state_dict().items()}


def by_hand(step: Step, optimizer: torch.optim.Optimizer, steps: int = 3) -> dict[str, torch.Tensor]:
    """Return the same state from a loop without knobs, written by hand."""
    torch.manual_seed(1)
    for _ in range(steps):
        step.loss_of(step.model, step.batch).backward()
        optimizer.step()
        optimizer.zero_grad()
    return {name: value.clone() for name, value in step.model.state_dict().items()}


def assert_equal(one: Any, other: Any) -> None:
    """Assert equality up to the order of sums in double precision."""
    torch.testing.assert_close(one, other, rtol=1e-10, atol=1e-12)


# Optimizers, trained for real.


@pytest.mark.parametrize("choice", KINDS)
@pytest.mark.parametrize("update", ["as written", "foreach", "fused", "per tensor", "in backward"])
def test_every_optimizer_trains_the_same_with_every_update(choice: Any, update: str) -> None:
    knobs = Knobs(optimizer=choice, update=update)
    kind, settings = KINDS[choice]
    if kind is torch.optim.Adafactor and update == "fused":
        with pytest.raises(
            ValueError, match="Adafactor has no fused update; write update= one of 'foreach', 'per tensor'"
        ):
            trained(step_of(flat), knobs)
        return
    step = step_of(flat)
    expected = by_hand(step, kind(step.model.parameters(), **settings))
    assert_equal(trained(step_of(flat), knobs), expected)


def groups(model: nn.Module) -> list[dict[str, Any]]:
    return [{"params": [model[0].weight], "lr": 0.5}, {"params": list(model.parameters())[1:], "momentum": 0.3}]


@pytest.mark.parametrize(
    ("written", "alike"),
    [
        (torch.optim.Adadelta, torch.optim.Adadelta),
        (SGD, SGD),
        (lambda weights: torch.optim.RMSprop(weights, lr=0.02), functools.partial(torch.optim.RMSprop, lr=0.02)),
        (None, torch.optim.AdamW),
    ],
)
@pytest.mark.parametrize("update", ["as written", "foreach", "per tensor", "in backward"])
def test_the_optimizer_of_the_step(written: Any, alike: Callable[..., torch.optim.Optimizer], update: str) -> None:
    step = step_of(flat)
    expected = by_hand(step, alike(step.model.parameters()))
    assert_equal(trained(step_of(flat, written), Knobs(update=update)), expected)


@pytest.mark.parametrize("update", ["as written", "foreach", "fused", "per tensor", "in backward"])
def test_an_optimizer_object_passes_on_the_settings_of_its_groups(update: str) -> None:
    step = step_of(flat)
    expected = by_hand(step, torch.optim.SGD(groups(step.model), lr=0.1))
    other = step_of(flat)
    mine = torch.optim.SGD(groups(other.model), lr=0.1)
    before = copy.deepcopy(mine.state_dict())
    other = Step(other.model, other.batch, loss=other.loss, optimizer=mine)
    assert_equal(trained(other, Knobs(update=update)), expected)
    assert mine.state_dict() == before


def test_a_setting_that_a_scheduler_changed_is_kept() -> None:
    model = flat()
    mine = torch.optim.AdamW(model.parameters(), lr=0.1)
    torch.optim.lr_scheduler.StepLR(mine, 1, gamma=0.5)
    mine.param_groups[0]["lr"] = 0.05
    made = make(mine, Knobs(update="fused"), model.parameters())
    assert (type(made), made.param_groups[0]["lr"], made.param_groups[0]["fused"]) == (torch.optim.AdamW, 0.05, True)


def test_other_weights_get_the_settings_that_all_groups_share() -> None:
    model = flat()
    mine = torch.optim.SGD(groups(model), lr=0.1, weight_decay=0.2)
    new = nn.Parameter(torch.zeros(2))
    made = make(mine, Knobs(), [model[0].weight, new])
    settings = [(group["params"][0] is new, group["lr"], group["weight_decay"]) for group in made.param_groups]
    # The learning rates of the groups differ, so the new weight gets the optimizer's own.
    assert settings == [(False, 0.5, 0.2), (True, 0.1, 0.2)]


@pytest.mark.parametrize(
    ("kind", "update", "message"),
    [
        (torch.optim.RMSprop, "fused", "RMSprop has no fused update; write update= one of 'foreach', 'per tensor'"),
        (torch.optim.LBFGS, "foreach", "LBFGS has no foreach update; write update= one of 'per tensor', 'in backward'"),
    ],
)
def test_an_update_that_the_optimizer_does_not_have(kind: Any, update: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        trained(step_of(flat, kind), Knobs(update=update))


# Micro-batches.


@pytest.mark.parametrize("count", [1, 2, 4, 8])
def test_micro_batches_train_as_the_whole_batch(count: int) -> None:
    expected = trained(step_of(flat, SGD), Knobs())
    assert_equal(trained(step_of(flat, SGD), Knobs(accumulation=count)), expected)


def test_micro_batches_give_batch_norm_other_statistics() -> None:
    expected = trained(step_of(images, SGD), Knobs())
    other = trained(step_of(images, SGD), Knobs(accumulation=4))
    assert not torch.allclose(other["0.weight"], expected["0.weight"])
    # Statistics are updated once for each micro-batch: 3 steps of 4.
    assert (expected["1.num_batches_tracked"], other["1.num_batches_tracked"]) == (3, 12)


def test_a_note_about_batch_norm_and_micro_batches() -> None:
    step = step_of(images)
    assert any("Batch norm" in note for note in train(step, Knobs(accumulation=2), step.model, range(1), []).notes)
    assert train(step, Knobs(batch=2), step.model, range(1), []).notes == ()


def test_a_larger_batch_repeats_the_samples() -> None:
    # Each sample twice has the same mean, so the same gradients.
    assert_equal(trained(step_of(flat, SGD), Knobs(batch=16)), trained(step_of(flat, SGD), Knobs()))


@pytest.mark.parametrize("knobs", [Knobs(accumulation=3), Knobs(batch=10, accumulation=4)], ids=str)
def test_micro_batches_must_divide_the_batch(knobs: Knobs) -> None:
    with pytest.raises(ValueError, match=f"accumulation={knobs.accumulation} does not divide"):
        trained(step_of(flat), knobs)


# Several losses in a step.


def two(model: nn.Module, batch: Any) -> Iterator[torch.Tensor]:
    """Yield the loss of the whole network, and after its backward pass a penalty on the first layer."""
    yield functional.cross_entropy(model(batch[0]), batch[1])
    assert model[0].weight.grad is not None
    yield 0.1 * model[0](batch[0]).square().mean()


@pytest.mark.parametrize(
    "knobs", [Knobs(), Knobs(accumulation=4), Knobs(precision="bf16"), Knobs(checkpoint="every 1")], ids=str
)
def test_several_losses_train_as_their_loop_written_by_hand(knobs: Knobs) -> None:
    dtype = torch.float32 if "precision" in knobs.changed() else torch.float64
    step = step_of(flat, SGD, dtype)
    torch.manual_seed(1)
    optimizer = SGD(step.model.parameters())
    for _ in range(3):
        for part in step.micro_batches(step.batch, knobs.accumulation or 1):
            losses = two(step.model, part)
            for _ in range(2):
                with torch.autocast("cpu", torch.bfloat16, enabled="precision" in knobs.changed()):
                    loss = next(losses) / (knobs.accumulation or 1)
                loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    expected = {name: value.clone() for name, value in step.model.state_dict().items()}
    assert_equal(trained(dataclasses.replace(step_of(flat, SGD, dtype), loss=None, compute_loss=two), knobs), expected)


def test_several_losses_without_training() -> None:
    def two_means(model: nn.Module, batch: Any) -> Iterator[torch.Tensor]:
        return (model(batch[0]).mean() for _ in range(2))

    step = dataclasses.replace(step_of(flat), loss=None, compute_loss=two_means)
    kept: list[Any] = []
    train(step, Knobs(mode="inference"), step.model, range(1), kept)
    assert not kept[-1].requires_grad


# zero_grad, precision, inference, and the model afterwards.


@pytest.mark.parametrize("zero_grad", ["set to none", "set to zero"])
@pytest.mark.parametrize("accumulation", [1, 2])
def test_zero_grad_either_way_trains_the_same(zero_grad: str, accumulation: int) -> None:
    step = step_of(flat, SGD)
    expected = by_hand(step, SGD(step.model.parameters()))
    other = step_of(flat, SGD)
    assert_equal(trained(other, Knobs(zero_grad=zero_grad, accumulation=accumulation)), expected)
    left = [weight.grad for weight in other.model.parameters()]
    if zero_grad == "set to none":
        assert left == [None] * len(left)
    else:
        assert all(gradient.abs().sum() == 0 for gradient in left)


@pytest.mark.parametrize("precision", ["bf16", "fp16", "all bf16"])
def test_lower_precision_trains_nearly_the_same(precision: str) -> None:
    single = functools.partial(step_of, flat, SGD, dtype=torch.float32)
    start = {name: value.clone() for name, value in single().model.state_dict().items()}
    expected, lower = trained(single(), Knobs()), trained(single(), Knobs(precision=precision))
    for name, value in lower.items():
        assert value.dtype is torch.float32
        # Gradients are off by a quarter at most, and each of three steps rounds a bf16 weight to its 8 bits.
        moved = (expected[name] - start[name]).abs().max()
        assert (value - expected[name]).abs().max() < moved / 4 + 3 * 2**-8 * start[name].abs().max()
        assert not torch.equal(value, start[name])


@pytest.mark.parametrize(
    "knobs", [Knobs(frozen="0"), Knobs(frozen="0", optimizer="Adam", update="in backward")], ids=str
)
def test_frozen_weights_stay(knobs: Knobs) -> None:
    step = step_of(flat, SGD)
    before = step.model[0].weight.clone(), step.model[2].weight.clone()
    after = trained(step, knobs)
    assert torch.equal(after["0.weight"], before[0])
    assert not torch.equal(after["2.weight"], before[1])


def test_a_model_without_trainable_weights_is_an_error() -> None:
    with pytest.raises(ValueError, match="no weight of the model trains"):
        trained(step_of(flat), Knobs(frozen=("0", "2", "4", "6")))


def test_inference_changes_nothing() -> None:
    step = step_of(Deep)
    before = everything(step.model)
    torch.manual_seed(0)
    before["random"] = torch.get_rng_state().tolist()
    with apply(Knobs(mode="inference"), step.model):
        train(step, Knobs(mode="inference", accumulation=2, update="in backward"), step.model, range(2), [])
    assert everything(step.model) == before


def test_hooks_of_the_step_in_backward_are_removed_after_an_error() -> None:
    def fails(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        raise KeyError

    step = step_of(flat)
    before = everything(step.model)["weight hooks"]
    with pytest.raises(KeyError):
        train(Step(step.model, step.batch, loss=fails), Knobs(update="in backward"), step.model, range(1), [])
    assert everything(step.model)["weight hooks"] == before


def test_gradients_are_freed_in_backward() -> None:
    step = step_of(flat)
    train(step, Knobs(update="in backward"), step.model, range(1), [])
    assert [weight.grad for weight in step.model.parameters()] == [None] * 8
    assert len(gradients(step, step.model)[1]) == 8


@pytest.mark.parametrize(
    "further",
    [{"accumulation": 2}, {"precision": "fp16"}, {"zero_grad": "set to zero"}],
    ids=lambda knobs: next(iter(knobs)),
)
def test_knobs_that_contradict_an_update_in_backward(further: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="update in backward frees each gradient at once"):
        trained(step_of(flat), Knobs(update="in backward", **further))
