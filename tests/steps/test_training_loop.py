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

from memexplore.analysis import curves
from memexplore.knobs.apply import apply
from memexplore.knobs.knobs import Knobs
from memexplore.steps.optimizers import KINDS, make
from memexplore.steps.step import Step
from memexplore.steps.training_loop import knobs_to_apply, train
from memexplore.steps.trial import run
from memexplore.tape import Action, Category, Phase, Tape
from tests.small_nets import Deep, everything, flat, gradients, images, step_of

SGD = functools.partial(torch.optim.SGD, lr=0.1)


def trained(step: Step, knobs: Knobs, steps: int = 3) -> dict[str, torch.Tensor]:
    """Return the model's state after some steps of real training; the random numbers are the same in every call."""
    torch.manual_seed(1)
    with apply(knobs_to_apply(knobs), step.model):
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


# Optimizers, really trained.


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
    told = [(group["params"][0] is new, group["lr"], group["weight_decay"]) for group in made.param_groups]
    # The learning rates of the groups differ, so the new weight gets the optimizer's own.
    assert told == [(False, 0.5, 0.2), (True, 0.1, 0.2)]


@pytest.mark.parametrize(
    ("kind", "update", "words"),
    [
        (torch.optim.RMSprop, "fused", "RMSprop has no fused update; write update= one of 'foreach', 'per tensor'"),
        (torch.optim.LBFGS, "foreach", "LBFGS has no foreach update; write update= one of 'per tensor', 'in backward'"),
    ],
)
def test_an_update_that_the_optimizer_does_not_have(kind: Any, update: str, words: str) -> None:
    with pytest.raises(ValueError, match=words):
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


# zero_grad, precision, inference, and what is left behind.


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


# The virtual GPU: two linear layers without bias, of 1024 x 2048 and 2048 x 512 weights.

FIRST, SECOND = 1024 * 2048, 2048 * 512
WEIGHTS = FIRST + SECOND


def virtual_step(optimizer: Any = SGD, rows: int = 32) -> Step:
    model = nn.Sequential(nn.Linear(1024, 2048, bias=False), nn.ReLU(), nn.Linear(2048, 512, bias=False))
    return Step(model, (torch.zeros(rows, 1024), torch.zeros(rows, 512)), loss=functional.mse_loss, optimizer=optimizer)


def highest(tape: Tape, category: Category) -> int:
    """Requested bytes of a category when it has most."""
    return int(curves.by_category(tape, "requested")[category].max())


def at_end_of_forward(tape: Tape, category: Category) -> int:
    """Requested bytes of a category when backward begins, the last time."""
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
    """Requested bytes of temporaries in the optimizer at their highest."""
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


def test_fused_sgd_needs_its_momentum_alone() -> None:
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
    # 1 GiB of weights in fp32, half of that in bf16, on a card with 0.75 GiB.
    model = nn.Sequential(*(nn.Linear(4096, 4096, bias=False) for _ in range(16)))
    step = Step(lambda: model, torch.zeros(1, 4096), loss=torch.mean, optimizer=SGD)
    tapes = {
        knobs: run(step, knobs, gpu="768MiB").tape
        for knobs in (Knobs(mode="inference"), Knobs(mode="inference", precision="all bf16"))
    }
    assert [Action.OOM in tape.action for tape in tapes.values()] == [True, False]


SCALARS = 4 + 4
"""The loss, and the one that backward begins with."""


def test_bf16_autocast_saves_half_of_the_activations() -> None:
    plain, lower = (run(virtual_step(rows=64), Knobs(precision=p)).tape for p in ("as written", "bf16"))
    # ReLU's result, and the output of 64 x 512 that mse_loss saves.
    assert at_end_of_forward(plain, Category.ACTIVATION) == 4 * 64 * 2048 + 4 * 64 * 512 + SCALARS
    # ReLU's result in bf16, the output back in fp32 for mse_loss; the cast input, for the gradient of the first weight,
    # and the cast second weight, for the gradient of ReLU's result.
    halves = 2 * 64 * 2048 + 2 * 64 * 1024 + 2 * SECOND
    assert at_end_of_forward(lower, Category.ACTIVATION) == halves + 4 * 64 * 512 + SCALARS


def test_fp16_has_a_scaler() -> None:
    trial = run(virtual_step(), Knobs(precision="fp16"))
    # The loss times the scale is the only product of this step.
    assert "aten::mul" in trial.tape.ops
    assert "aten::mul" not in run(virtual_step(), Knobs(precision="bf16")).tape.ops
    assert trial.applied.texts == ("fp16 autocast with GradScaler",)


def test_micro_batches_divide_activations_and_inputs() -> None:
    whole, parts = (run(virtual_step(rows=64), Knobs(accumulation=n)).tape for n in (1, 4))
    assert highest(parts, Category.INPUT) * 4 == highest(whole, Category.INPUT) == 4 * 64 * (1024 + 512)
    assert at_end_of_forward(whole, Category.ACTIVATION) == 4 * 64 * (2048 + 512) + SCALARS
    # A micro-batch has a quarter of the samples.
    assert at_end_of_forward(parts, Category.ACTIVATION) == 64 * (2048 + 512) + SCALARS


def test_offload_leaves_no_activation_at_the_end_of_forward() -> None:
    step = virtual_step(rows=64)
    tape = run(step, Knobs(offload="saved tensors on the CPU")).tape
    # The output, which mse_loss saves outside the model; ReLU's result waits on the CPU.
    assert at_end_of_forward(tape, Category.ACTIVATION) == 4 * 64 * 512 + SCALARS


def test_frozen_layers_have_neither_gradients_nor_state() -> None:
    tape = run(virtual_step(), Knobs(frozen="0", optimizer="Adam")).tape
    assert highest(tape, Category.GRADIENT) == 4 * SECOND
    assert highest(tape, Category.OPTIMIZER_STATE) == 2 * 4 * SECOND


def test_adapters_alone_have_gradients_and_state() -> None:
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


def test_channels_last_has_a_second_batch_only_while_it_is_laid_out() -> None:
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
def test_a_run_leaves_the_model_as_it_was(knobs: Knobs) -> None:
    step = step_of(images, dtype=torch.float32)
    before = everything(step.model)
    run(step, knobs)
    assert everything(step.model) == before
