"""A step as a value: batches of other sizes, micro-batches, and the loss."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.utils import _pytree as pytree

import memexplore as mx
from memexplore.run.programs.step import Step
from memexplore.virtual_gpu.tensors.tensor import is_virtual

LINEAR = nn.Linear(4, 2)
IMAGES = torch.randn(2, 3, 8, 12), torch.zeros(2, 1, 8, 12), torch.tensor([1, 0])
TOKENS = {"input_ids": torch.arange(12).reshape(2, 6), "labels": torch.arange(12).reshape(2, 6), "flag": True}


def shapes(batch: Any) -> list[tuple[int, ...]]:
    return [tuple(value.shape) for value in pytree.tree_leaves(batch) if isinstance(value, torch.Tensor)]


@pytest.mark.parametrize(
    ("batch", "size", "input_size"),
    [(torch.zeros(5, 4), 5, None), (IMAGES, 2, 8), (TOKENS, 2, 6), ((torch.zeros(3, 7, 16),), 3, 7)],
)
def test_sizes_of_a_batch(batch: Any, size: int, input_size: int | None) -> None:
    step = Step(LINEAR, batch)
    assert (step.batch_size, step.input_size) == (size, input_size)


def test_a_batch_of_another_size() -> None:
    assert shapes(Step(LINEAR, IMAGES).batch_of(5)) == [(5, 3, 8, 12), (5, 1, 8, 12), (5,)]
    assert shapes(Step(LINEAR, TOKENS).batch_of(1)) == [(1, 6), (1, 6)]


def test_images_keep_their_proportions() -> None:
    assert shapes(Step(LINEAR, IMAGES).batch_of(None, 16)) == [(2, 3, 16, 24), (2, 1, 16, 24), (2,)]


def test_sequences_of_another_length() -> None:
    assert shapes(Step(LINEAR, TOKENS).batch_of(4, 9)) == [(4, 9), (4, 9)]


def test_an_input_size_of_a_batch_that_has_none() -> None:
    with pytest.raises(ValueError, match="neither images nor sequences"):
        Step(LINEAR, torch.zeros(4, 4)).batch_of(None, 3)


def test_samples_of_a_larger_batch_are_repeated() -> None:
    batch = torch.tensor([[1.0], [2.0]])
    assert Step(LINEAR, batch).batch_of(5)[:, 0].tolist() == [1, 2, 1, 2, 1]


def test_large_batches_have_values_where_no_virtual_gpu_is_on() -> None:
    step = Step(LINEAR, torch.ones(2, 1 << 18))  # 2 MiB
    assert not is_virtual(step.batch_of(4))
    with mx.virtual("T4"):
        assert is_virtual(step.batch_of(4))
        assert not is_virtual(Step(LINEAR, torch.ones(2, 4)).batch_of(4))


@given(st.integers(1, 6), st.integers(1, 6))
def test_micro_batches_together_are_the_batch(count: int, share: int) -> None:
    samples = count * share
    batch = {"x": torch.arange(samples * 3).reshape(samples, 3), "y": torch.arange(samples), "scale": torch.tensor(2.0)}
    step = Step(LINEAR, batch)
    parts = list(step.micro_batches(batch, count))
    assert len(parts) == count
    for name in ("x", "y"):
        assert torch.equal(torch.cat([part[name] for part in parts]), batch[name])
    assert all(part["scale"] is batch["scale"] for part in parts)


def test_micro_batches_of_unequal_sizes_are_an_error() -> None:
    step = Step(LINEAR, torch.zeros(4, 4))
    with pytest.raises(ValueError, match="accumulation=3 does not divide the batch of 4; write one of its divisors"):
        list(step.micro_batches(step.batch, 3))


def bags(batch: Any, samples: int) -> Any:
    """Return bags of three entries each, and the index at which each begins."""
    return torch.arange(3 * samples) % 9, torch.arange(0, 3 * samples, 3)


def detection(images: int) -> tuple[Any, ...]:
    """Return images with a list of targets, one for each, as a detector takes them."""
    return torch.zeros(images, 3, 8, 8), [{"boxes": torch.zeros(number, 4)} for number in range(5, 5 + images)]


def test_a_list_of_targets_has_as_many_as_the_batch() -> None:
    step = Step(nn.Conv2d(3, 4, 3), detection(4), compute_loss=lambda model, batch: model(batch[0]).mean())
    assert step.unavailable_knobs() == {}
    images, targets = step.batch_of(6)
    # Of a larger batch the first ones come again.
    assert (len(images), [len(target["boxes"]) for target in targets]) == (6, [5, 6, 7, 8, 5, 6])
    assert [len(target["boxes"]) for target in step.batch_of(2)[1]] == [5, 6]
    parts = list(step.micro_batches(step.batch_of(), 2))
    assert [[len(target["boxes"]) for target in part[1]] for part in parts] == [[5, 6], [7, 8]]


def test_images_of_different_sizes_are_a_list_of_samples() -> None:
    images = [torch.zeros(3, size, size) for size in (8, 9, 10, 11)]
    step = Step(
        nn.Conv2d(3, 4, 3), (images, [{"boxes": torch.zeros(1, 4)}] * 4), samples=4, compute_loss=lambda *_: None
    )
    assert [len(part) for part in step.batch_of(2)] == [2, 2]


def test_the_state_of_a_recurrent_network_is_no_list_of_samples() -> None:
    # Two layers, as many as there are samples: hidden state and cell are a pair, not two samples.
    state = torch.zeros(2, 2, 4), torch.zeros(2, 2, 4)
    step = Step(nn.LSTM(4, 4, 2, batch_first=True), (torch.zeros(2, 5, 4), state), compute_loss=lambda *_: None)
    assert len(step.batch_of(1)[1]) == 2


def test_a_batch_with_a_function_that_resizes_it() -> None:
    step = Step(nn.EmbeddingBag(9, 2), bags(None, 4), samples=4, resize=bags)
    assert (step.batch_size, step.input_size) == (4, None)
    assert step.batch_of() == step.batch
    assert shapes(step.batch_of(6)) == [(18,), (6,)]
    assert [shapes(part) for part in step.micro_batches(step.batch_of(6), 3, 6)] == [[(6,), (2,)]] * 3


def test_the_size_of_a_batch_without_a_sample_dimension_is_fixed() -> None:
    step = Step(LINEAR, torch.zeros(5, 4), samples=1)
    assert step.batch_of(1) is not None
    with pytest.raises(ValueError, match="no tensor of the batch has its 1 sample along the first dimension"):
        step.batch_of(2)
    with pytest.raises(ValueError, match="accumulation=2 does not divide the batch of 1"):
        list(step.micro_batches(step.batch, 2))


class Answers(nn.Module):
    def forward(self, x: torch.Tensor, labels: Any = None) -> Any:
        return SimpleNamespace(loss=x.sum(), logits=x)


ONES = torch.ones(2, 2)


@pytest.mark.parametrize(
    ("batch", "loss", "expected"),
    [
        (ONES, torch.mean, 1),
        ((ONES, ONES * 3), nn.functional.mse_loss, 4),  # (3 - 1) squared
        ((ONES, ONES, ONES), lambda output, one, two: (output + one + two).sum(), 12),  # 3 of each of 4
        ({"input": ONES}, lambda output, batch: (output + batch["input"]).sum(), 8),
        (ONES.sum()[None], None, None),
    ],
)
def test_loss_is_called_with_output_and_targets(batch: Any, loss: Any, expected: float | None) -> None:
    step = Step(nn.Identity(), batch, loss=loss)
    if expected is None:
        with pytest.raises(TypeError, match="the model's output has no loss"):
            step.loss_of(step.model, batch)
    else:
        assert step.loss_of(step.model, batch).item() == expected


def test_a_loss_that_calls_the_model() -> None:
    step = Step(nn.Identity(), (ONES, ONES), compute_loss=lambda model, batch: model(batch[0] + batch[1]).sum())
    assert step.loss_of(step.model, step.batch).item() == 8


def test_a_step_has_one_loss() -> None:
    with pytest.raises(TypeError, match="give loss=function of output and target, or compute_loss=, not both"):
        Step(LINEAR, ONES, loss=torch.mean, compute_loss=lambda model, batch: model(batch).sum())


def test_a_function_of_the_model_is_no_criterion() -> None:
    with pytest.raises(TypeError, match=r"Pass it as compute_loss=, which is called as compute_loss\(model, batch\)"):
        Step(LINEAR, ONES, loss=lambda model, batch: model(batch).sum())


PAIR = (torch.ones(8, 4), torch.ones(8))


@pytest.mark.parametrize(
    ("batch", "loss", "call"),
    [
        (PAIR, lambda output: output.sum(), "loss(output, target) with Tensor(8, 4), Tensor(8), "),
        (PAIR[0], nn.functional.mse_loss, "loss(output) with Tensor(8, 4), "),
        (PAIR[0], nn.MSELoss(), "loss(output) with Tensor(8, 4), "),
        (PAIR[0], torch.dot, "loss(output) with Tensor(8, 4), "),
        ((*PAIR, 3), nn.MSELoss(), "loss(output, target_1, target_2) with Tensor(8, 4), Tensor(8), int, "),
        ({"input": ONES}, torch.sin, "loss(output, batch) with Tensor(2, 2), {input: Tensor(2, 2)}, "),
    ],
)
def test_a_loss_that_does_not_take_what_it_is_given(batch: Any, loss: Any, call: str) -> None:
    step = Step(nn.Identity(), batch, loss=loss)
    with pytest.raises(TypeError) as caught:
        step.loss_of(step.model, batch)
    assert str(caught.value).startswith(f"loss was called as {call}and does not take that (")
    assert str(caught.value).endswith("or write Step(..., compute_loss=function of model and batch)")


def test_a_compute_loss_that_does_not_take_model_and_batch() -> None:
    step = Step(nn.Identity(), ONES, compute_loss=lambda model: model)
    with pytest.raises(TypeError, match=r"compute_loss was called as compute_loss\(model, batch\), and does not take"):
        step.loss_of(step.model, ONES)


@pytest.mark.parametrize("name", ["loss", "compute_loss"])
def test_a_type_error_inside_a_loss_is_its_own(name: str) -> None:
    def fails(*_: Any) -> Any:
        raise TypeError("in here")

    step = Step(nn.Identity(), ONES, **{name: fails})
    with pytest.raises(TypeError, match=r"^in here$"):
        step.loss_of(step.model, ONES)


def test_the_loss_attribute_of_the_output() -> None:
    step = Step(Answers(), {"x": ONES, "labels": ONES})
    assert step.loss_of(step.model, step.batch).item() == 4


@pytest.mark.parametrize(
    ("kind", "given"),
    [(TypeError, (3, ONES)), (TypeError, (LINEAR, ONES, 3)), (ValueError, (LINEAR, {})), (ValueError, (LINEAR, 3))],
)
def test_arguments_that_make_no_step(kind: type[Exception], given: tuple[Any, ...]) -> None:
    with pytest.raises(kind):
        Step(*given)


@pytest.mark.parametrize(
    ("kind", "given"),
    [
        (ValueError, {"samples": 0}),
        (ValueError, {"samples": 2.0}),
        (TypeError, {"resize": 3}),
        (TypeError, {"compute_loss": 3}),
    ],
)
def test_arguments_of_a_wrong_kind(kind: type[Exception], given: dict[str, Any]) -> None:
    with pytest.raises(kind):
        Step(LINEAR, ONES, **given)
