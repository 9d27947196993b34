"""Batches of any form, shared between a model and a criterion as a training script would."""

from __future__ import annotations

import collections
import dataclasses
import typing
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.utils.rnn import pack_padded_sequence

import memexplore as mx
from memexplore.run.machine import machine_of
from memexplore.run.programs import batches
from memexplore.run.programs.optimizers import written
from memexplore.run.programs.step import Step
from memexplore.run.run import run
from memexplore.tape import Category

X, MASK, Y = torch.randn(4, 8), torch.ones(4, 8), torch.zeros(4, dtype=torch.long)


class Masked(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 3)

    def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        return self.linear(x * mask)


class MaybeMasked(Masked):
    def forward(self, x: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:
        return self.linear(x if mask is None else x * mask)


@dataclasses.dataclass(frozen=True)
class Record:
    x: torch.Tensor
    mask: torch.Tensor
    label: torch.Tensor


class Row(typing.NamedTuple):
    x: torch.Tensor
    mask: torch.Tensor
    label: torch.Tensor


FORMS = {
    "((x, mask), y)": ((X, MASK), Y),
    "(x, mask, y)": (X, MASK, Y),
    "(dict, y)": ({"x": X, "mask": MASK}, Y),
    "(mapping, y)": (collections.UserDict({"x": X, "mask": MASK}), Y),
    "dict": {"mask": MASK, "x": X, "label": Y},
    "dataclass": Record(X, MASK, Y),
    "NamedTuple": Row(X, MASK, Y),
}


@pytest.mark.parametrize("loss", [F.cross_entropy, nn.CrossEntropyLoss(), lambda output, y: F.cross_entropy(output, y)])
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("model", [Masked(), MaybeMasked()])
def test_batch_is_shared_as_a_script_would(model: nn.Module, form: str, loss: Any) -> None:
    step = Step(model, FORMS[form], loss=loss)
    expected = F.cross_entropy(model(X, MASK), Y)
    assert torch.equal(step.loss_of(model, step.batch), expected)


@pytest.mark.parametrize("form", FORMS)
def test_batch_of_any_form_has_another_size_and_micro_batches(form: str) -> None:
    step = Step(Masked(), FORMS[form], loss=F.cross_entropy, optimizer="sgd")
    tape = run(step, mx.Knobs(batch=6, accumulation=3), machine_of("T4")).tape
    # Each of 3 micro-batches of 2 copies x and mask, 2 x 8 floats, and y, 2 integers, to the GPU.
    inputs = sorted(tape.size[tape.category == Category.INPUT].tolist())
    assert {64, 16} <= set(inputs)
    assert [tuple(tensor.shape)[0] for tensor in batches.tensors(step.batch_of(6))] == [6, 6, 6]


@pytest.mark.parametrize("model", [nn.DataParallel(Masked()), torch.compile(Masked())])
def test_wrappers_are_looked_through(model: nn.Module) -> None:
    assert batches.call_of(model, F.cross_entropy, (X, MASK, Y)).args == (X, MASK)


def test_weights_of_a_criterion_stay_its_own() -> None:
    weights = torch.ones(3)
    assert batches.call_of(nn.Linear(8, 3), F.cross_entropy, (X, Y, weights)).targets == (Y, weights)


def test_list_is_one_argument() -> None:
    assert batches.call_of(Masked(), F.cross_entropy, ([X, X], Y, Y)).args == ([X, X], Y)


def test_tuple_for_a_model_with_one_argument_stays_a_tuple() -> None:
    assert batches.call_of(nn.Identity(), F.mse_loss, ((X, X), Y)).args == ((X, X),)


def test_criterion_takes_the_parts_that_it_names() -> None:
    batch = {"x": X, "mask": MASK, "weight": MASK, "label": Y}
    call = batches.call_of(Masked(), lambda output, label, weight: output, batch)
    assert call.targets == (Y, MASK)


def test_function_of_output_and_batch_takes_the_whole_batch() -> None:
    batch = {"x": X, "mask": MASK}
    assert batches.call_of(Masked(), lambda output, batch: output, batch).targets == (batch,)


def test_logits_of_a_models_output_go_to_a_criterion_of_torch() -> None:
    @dataclasses.dataclass
    class Output:
        logits: torch.Tensor

    assert batches.criterion_input(Output(X)) is X
    assert batches.criterion_input({"out": X}) is X
    assert batches.criterion_input((X, X)) == (X, X)


LOSS = torch.tensor(2.0)


@pytest.mark.parametrize(
    ("output", "expected"),
    [
        (LOSS, 2.0),
        ((X, LOSS), 2.0),
        ({"loss": LOSS, "logits": X}, 2.0),
        ({"boxes": LOSS, "labels": LOSS}, 4.0),  # 2 + 2, as torchvision's detection models return them
        ((LOSS, LOSS), None),
        (X, None),
        ({}, None),
    ],
)
def test_loss_in_the_output_of_a_model(output: Any, expected: float | None) -> None:
    found = batches.own_loss(output)
    assert (None if found is None else found.item()) == expected


def test_model_that_returns_its_loss_takes_the_targets() -> None:
    class Gpt(nn.Linear):
        def forward(self, idx: torch.Tensor, targets: torch.Tensor | None = None) -> Any:  # type: ignore[override]
            logits = super().forward(idx)
            return logits, None if targets is None else F.cross_entropy(logits, targets)

    model = Gpt(8, 3)
    assert torch.equal(Step(model, (X, Y)).loss_of(model, (X, Y)), F.cross_entropy(model(X)[0], Y))


@pytest.mark.parametrize(
    ("model", "batch", "loss", "words"),
    [
        (
            Masked(),
            (X, Y),
            F.cross_entropy,
            "the batch is (Tensor(4, 8), Tensor(4)), the model's forward takes x, mask",
        ),
        (
            Masked(),
            {"image": X, "label": Y},
            F.cross_entropy,
            "names image, label, and the model's forward takes x, mask",
        ),
        (Masked(), {"x": X, "mask": MASK, "y": Y}, None, "names x, mask, y, and the model's forward takes x, mask"),
        (nn.Linear(8, 3), (X, Y), None, "the model's output has no loss, it is Tensor(4, 3): give Step(..., loss="),
        (
            nn.LSTM(8, 3),
            (X, Y),
            F.mse_loss,
            "loss was called as loss(output, target) with (Tensor(4, 3), (Tensor(1, 3)",
        ),
        (nn.Linear(8, 3), ((X, X), Y), F.mse_loss, "must be Tensor, not tuple"),
    ],
)
def test_error_names_the_form_that_was_given(model: nn.Module, batch: Any, loss: Any, words: str) -> None:
    with pytest.raises(TypeError) as caught:
        Step(model, batch, loss=loss).loss_of(model, batch)
    assert words in str(caught.value)


def test_batch_without_tensors_is_named() -> None:
    with pytest.raises(ValueError, match=r"the batch is \(str, int\), without a tensor"):
        Step(nn.Linear(8, 3), ("a", 1))


def test_packed_sequences_keep_their_sizes_on_the_cpu() -> None:
    packed = pack_padded_sequence(torch.ones(3, 2, 8), torch.tensor([3, 1]))
    moved = batches.mapped(lambda tensor: tensor.to("meta"), packed)
    assert (moved.data.device.type, moved.batch_sizes.device.type) == ("meta", "cpu")


# -- optimizers


@pytest.mark.parametrize("name", ["adamw", "AdamW", "ADAMW", " torch.optim.AdamW"])
def test_optimizer_by_name(name: str) -> None:
    assert Step(nn.Linear(8, 3), (X, Y), loss=F.cross_entropy, optimizer=name).optimizer is torch.optim.AdamW


def test_every_optimizer_of_torch_has_a_name() -> None:
    kinds = [kind for kind in vars(torch.optim).values() if isinstance(kind, type)]
    for kind in kinds:
        if issubclass(kind, torch.optim.Optimizer) and kind is not torch.optim.Optimizer:
            assert written(kind.__name__.upper()) is kind


@pytest.mark.parametrize(
    ("given", "error", "words"),
    [
        ("adamw_8bit", ValueError, "did you mean AdamW"),
        ("zzzz", ValueError, "torch.optim has"),
        (3, TypeError, "write a name such as 'adamw'"),
        (lambda model: None, TypeError, "the first argument of this function is called model"),
    ],
)
def test_wrong_optimizer_is_one_sentence(given: Any, error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        Step(nn.Linear(8, 3), (X, Y), loss=F.cross_entropy, optimizer=given)


def test_function_that_returns_no_optimizer_is_named() -> None:
    step = Step(nn.Linear(8, 3), (X, Y), loss=F.cross_entropy, optimizer=lambda parameters: 5)
    with pytest.raises(TypeError, match="optimizer= returned int"):
        run(step, machine=machine_of("T4"))
