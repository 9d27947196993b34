"""The lines of plain PyTorch train as the knobs do, and save as much for backward."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

import memexplore as mx
from memexplore.run.code.lines import lines
from memexplore.run.knobs.inplace_sites.legal import legal_sites
from memexplore.run.knobs.knobs import Knobs
from memexplore.run.programs.step import Step
from memexplore.run.run import run
from memexplore.tape import Category
from tests.programs.test_training_loop import SGD, trained
from tests.programs.test_training_loop_memory import at_end_of_forward
from tests.small_nets import Deep, flat, images, step_of

STEPS = 3


def executed(text: str, step: Step, batches: list[Any], optimizer: Callable[..., Any]) -> dict[str, Any]:
    """Run lines in a script; return the model's state afterwards."""
    torch.manual_seed(1)
    script(text, step, batches, optimizer)
    return {name: value.detach().clone() for name, value in step.model.state_dict().items()}


def script(text: str, step: Step, batches: Iterable[Any], optimizer: Callable[..., Any]) -> dict[str, Any]:
    """Run lines with the names of a script, and an unchanged loop where they have none; return all names."""
    names: dict[str, Any] = {
        "model": step.model,
        "batches": batches,
        "loss_function": step.loss,
        "compute_loss": step.compute_loss,
        "dataset": torch.utils.data.TensorDataset(*step.batch) if "dataset" in text else None,
        "optimizer": optimizer(step.model.parameters()),
    }
    exec(text, names)
    if not re.search(r"in (enumerate\()?batches", text):
        for batch in names["batches"]:
            found = step.loss_of(names["model"], batch)
            for names["loss"] in found if isinstance(found, Iterator) else [found]:
                names["loss"].backward()
            names["optimizer"].step()
            names["optimizer"].zero_grad()
    if "hooks" in names:
        names["hooks"].__exit__()
    return names


LOOP = [
    Knobs(),
    Knobs(accumulation=4),
    Knobs(precision="off"),
    Knobs(precision="bf16"),
    Knobs(precision="fp16"),
    Knobs(precision="fp16", accumulation=2),
    Knobs(precision="all bf16"),
    Knobs(optimizer="SGD"),
    Knobs(optimizer="SGD with momentum", update="foreach"),
    Knobs(optimizer="Adam", update="fused"),
    Knobs(optimizer="AdamW", update="per tensor"),
    Knobs(optimizer="Adafactor"),
    Knobs(optimizer="Adafactor", update="in backward"),
    Knobs(update="foreach"),
    Knobs(update="fused"),
    Knobs(update="in backward"),
    Knobs(zero_grad="set to zero"),
    Knobs(offload="saved tensors on the CPU"),
    Knobs(offload="saved tensors on the CPU", precision="bf16", accumulation=2),
    Knobs(frozen=("0",)),
    Knobs(frozen=("0",), optimizer="Adam", accumulation=2, zero_grad="set to none"),
]
CHECKPOINTS = ["none", "every 1", "every 2", "sqrt", "keep matmuls", "norms"]


@pytest.mark.parametrize("knobs", LOOP, ids=str)
@pytest.mark.parametrize("make", [flat, images])
def test_the_lines_train_as_the_knobs_do(make: Any, knobs: Knobs) -> None:
    dtype = torch.float64 if "precision" not in knobs.changed() else torch.float32
    expected = trained(step_of(make, SGD, dtype), knobs, STEPS)
    step = step_of(make, SGD, dtype)
    text = lines(step, knobs).replace('"cuda"', '"cpu"')
    result = executed(text, step, [step.batch] * STEPS, SGD)
    lower = knobs.precision.value == "all bf16"
    for name, value in result.items():
        # `apply` restores to fp32 the weights that were trained in bf16.
        other = expected[name].to(value.dtype) if lower else expected[name]
        torch.testing.assert_close(value, other, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("checkpoint", CHECKPOINTS)
@pytest.mark.parametrize("make", [Deep, flat, images])
def test_the_lines_of_checkpoints_train_as_the_model_without(make: Any, checkpoint: str) -> None:
    step = step_of(make, SGD)
    result = executed(lines(step, Knobs(checkpoint=checkpoint)), step, [step.batch] * STEPS, SGD)
    expected = trained(step_of(make, SGD), Knobs(), STEPS)
    for name, value in result.items():
        if "running" in name or "num_batches" in name:
            continue  # they move twice, as the lines say
        torch.testing.assert_close(value, expected[name], rtol=1e-10, atol=1e-12)


def test_a_comment_that_batch_norm_updates_its_statistics_twice() -> None:
    assert "updates its running statistics twice" in lines(step_of(images), Knobs(checkpoint="layers 1"))
    assert "running statistics" not in lines(step_of(flat), Knobs(checkpoint="layers 1"))


def test_channels_last() -> None:
    knobs = Knobs(memory_format="channels last")
    expected = trained(step_of(images, SGD), knobs, STEPS)
    step = step_of(images, SGD)
    result = executed(lines(step, knobs), step, [step.batch] * STEPS, SGD)
    assert step.model[0].weight.is_contiguous(memory_format=torch.channels_last)
    torch.testing.assert_close(result, expected, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("choice", ["on", "off"])
def test_in_place(choice: str) -> None:
    step = step_of(images, SGD)
    step.model[2].inplace = choice == "off"
    model = step.model
    sites = legal_sites(lambda: step.loss_of(model, step.batch).backward(), model)
    result = executed(lines(step, Knobs(inplace=choice), sites), step, [step.batch] * STEPS, SGD)
    # The backward of SiLU reads its input.
    assert [model[index].inplace for index in (2, 5)] == [choice == "on", False]
    torch.testing.assert_close(result, trained(step_of(images, SGD), Knobs(), STEPS), rtol=1e-10, atol=1e-12)


def test_in_place_without_sites() -> None:
    model = flat()
    exec(lines(None, Knobs(inplace="on")), {"model": model})
    assert [model[index].inplace for index in (1, 3, 5)] == [True] * 3


def test_calls_in_the_models_code_are_comments() -> None:
    class Calling(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return functional.relu(self.linear(x))

    model = Calling()
    sites = legal_sites(lambda: model(torch.ones(1, 4)).sum().backward(), model)
    (line,) = lines(Step(model, torch.ones(1, 4)), Knobs(inplace="on"), sites).splitlines()
    assert line.startswith("# relu at test_lines.py:")
    assert line.endswith("use the form of relu that overwrites its input.")


def test_adapters_change_no_output_at_first_and_only_they_train() -> None:
    step = step_of(Deep)
    step.model.eval()
    before = step.loss_of(step.model, step.batch).item()
    exec(lines(step, Knobs(lora=("blocks.0", "head"), lora_rank=2)), {"model": step.model})
    loss = step.loss_of(step.model, step.batch)
    loss.backward()
    assert loss.item() == before
    trains = [
        name for name, weight in step.model.named_parameters() if name.startswith("head") and weight.grad is not None
    ]
    assert trains == ["head.down", "head.up"]


def test_inference() -> None:
    step = step_of(Deep)
    names: dict[str, Any] = {"model": step.model, "batches": [step.batch], "loss_function": step.loss}
    exec(lines(step, Knobs(mode="inference", accumulation=2, optimizer="Adam")), names)
    assert not step.model.training
    assert not names["loss"].requires_grad
    half = step.batch[0][4:], step.batch[1][4:]
    assert names["loss"].item() == step.loss_of(step.model, half).item()


def test_a_batch_of_another_size_is_loaded() -> None:
    expected = trained(step_of(flat, SGD), Knobs(batch=4, accumulation=2), 1)
    step = step_of(flat, SGD)
    text = lines(step, Knobs(batch=4, accumulation=2))
    # The first four of the eight samples, as the knobs take them.
    step = Step(step.model, tuple(value[:4] for value in step.batch), loss=step.loss, optimizer=SGD)
    result = executed(text, step, [], SGD)
    torch.testing.assert_close(result, expected, rtol=1e-10, atol=1e-12)


# The forms of a step.


class Answers(nn.Module):
    """A model that computes its own loss, as those of transformers do."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 3)

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> Any:
        answer = type("Answer", (), {})()
        answer.loss = functional.cross_entropy(self.linear(x), labels)
        return answer


def three(output: torch.Tensor, one: torch.Tensor, two: torch.Tensor) -> torch.Tensor:
    return (output - one).square().mean() + (output * two).mean()


FORMS: dict[str, Callable[[], Step]] = {
    "a tensor": lambda: Step(
        nn.Linear(4, 3), torch.randn(8, 4), loss=lambda output: output.square().mean(), optimizer=SGD
    ),
    "three tensors": lambda: Step(
        nn.Linear(4, 3), (torch.randn(8, 4), torch.randn(8, 3), torch.tensor(2.0)), loss=three, optimizer=SGD
    ),
    "a dict": lambda: Step(Answers(), {"x": torch.randn(8, 4), "labels": torch.randint(3, (8,))}, optimizer=SGD),
    "a dict with a loss": lambda: Step(
        nn.Linear(4, 3),
        {"input": torch.randn(8, 4)},
        loss=lambda output, batch: output.mean() + batch["input"].mean(),
        optimizer=SGD,
    ),
    "a loss that calls the model": lambda: Step(
        nn.Linear(4, 3),
        (torch.randn(8, 4), torch.randn(8, 3)),
        compute_loss=lambda model, batch: (model(batch[0]) - batch[1]).square().mean(),
        optimizer=SGD,
    ),
}


@pytest.mark.parametrize(
    "knobs", [Knobs(accumulation=2, offload="saved tensors on the CPU"), Knobs(precision="all bf16")], ids=str
)
@pytest.mark.parametrize("form", FORMS)
def test_every_form_of_a_step(form: str, knobs: Knobs) -> None:
    torch.manual_seed(0)
    step = FORMS[form]()
    expected = trained(step, knobs, STEPS)
    torch.manual_seed(0)
    step = FORMS[form]()
    result = executed(lines(step, knobs), step, [step.batch] * STEPS, SGD)
    for name, value in result.items():
        torch.testing.assert_close(value, expected[name].to(value.dtype), rtol=1e-5, atol=1e-6)


def test_an_output_that_is_the_loss() -> None:
    assert "loss = model(inputs)\n" in lines(Step(nn.Identity(), torch.ones(2, 2)), Knobs(zero_grad="set to zero"))


@pytest.mark.parametrize(
    ("written", "text"),
    [
        (None, "torch.optim.AdamW(model.parameters(), fused=True)"),
        (SGD, "torch.optim.SGD(model.parameters(), lr=0.1, fused=True)"),
        (
            lambda weights: torch.optim.Adam(weights, betas=(0.8, 0.9)),
            "torch.optim.Adam(model.parameters(), betas=(0.8, 0.9), fused=True)",
        ),
        (
            torch.optim.AdamW([nn.Parameter(torch.zeros(1))], lr=0.3),
            "torch.optim.AdamW(model.parameters(), lr=0.3, fused=True)",
        ),
    ],
)
def test_an_optimizer_keeps_its_settings(written: Any, text: str) -> None:
    step = Step(flat(), (torch.zeros(2, 8), torch.zeros(2)), loss=functional.mse_loss, optimizer=written)
    assert f"optimizer = {text}" in lines(step, Knobs(update="fused"))


class Own(torch.optim.SGD):
    """An optimizer outside of torch.optim."""


def test_an_optimizer_from_elsewhere_is_imported() -> None:
    step = step_of(flat, functools.partial(Own, lr=0.1))
    text = lines(step, Knobs(update="foreach"))
    assert f"from {Own.__module__} import Own" in text.splitlines()
    assert "optimizer = Own(model.parameters(), lr=0.1, foreach=True)" in text


# Memory: the lines save as much for backward as the knobs.


def big(make: Callable[[], nn.Module]) -> Step:
    return Step(
        make(), (torch.zeros(512, 8), torch.zeros(512, dtype=torch.long)), loss=functional.cross_entropy, optimizer=SGD
    )


@pytest.mark.parametrize(
    ("make", "knobs"),
    [
        (Deep, Knobs(checkpoint="every 1")),
        (Deep, Knobs(checkpoint="every 2")),
        (Deep, Knobs(checkpoint="layers blocks.0.act head")),
        (Deep, Knobs(checkpoint="keep matmuls")),
        (flat, Knobs(checkpoint="every 2")),
        (flat, Knobs(checkpoint="sqrt")),
        (Deep, Knobs(precision="bf16")),
        (Deep, Knobs(precision="all bf16")),
        (Deep, Knobs(accumulation=4)),
        (Deep, Knobs(offload="saved tensors on the CPU")),
        (Deep, Knobs(frozen=("blocks.0", "blocks.1"))),
        (Deep, Knobs(lora="blocks", lora_rank=2)),
    ],
    ids=lambda value: getattr(value, "__name__", str(value)),
)
def test_the_lines_save_as_much_for_backward(make: Any, knobs: Knobs) -> None:
    expected = at_end_of_forward(run(big(make), knobs).tape, Category.ACTIVATION)
    step = big(make)
    text = lines(step, knobs)
    with mx.virtual("T4"):
        step.model.cuda()
        with mx.record() as recording:
            executed(text, step, [tuple(value.cuda() for value in step.batch)] * 2, SGD)
    assert at_end_of_forward(recording.tape, Category.ACTIVATION) == expected
