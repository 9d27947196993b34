"""The knob `dropout`: a model that trains gives the results of evaluation mode, and everything is restored."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import pytest
import torch
from torch import nn
from torch.nn import functional

from memexplore.run.code.lines import lines
from memexplore.run.knobs.applying.apply import apply
from memexplore.run.knobs.control import Explored
from memexplore.run.knobs.knobs import Knobs, controls_of, knobs_of
from memexplore.run.machine import machine_of
from memexplore.run.programs.step import Step
from memexplore.run.run import run

OFF = Knobs(dropout="off")


class Functions(nn.Module):
    """Dropout by functions, and in attention."""

    def __init__(self, p: float) -> None:
        super().__init__()
        self.p, self.linear = p, nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = functional.dropout(self.linear(x), self.p, self.training)
        p = self.p if self.training else 0.0
        return functional.scaled_dot_product_attention(x, x, x, dropout_p=p)


class Recurrent(nn.Module):
    def __init__(self, p: float) -> None:
        super().__init__()
        self.lstm = nn.LSTM(8, 8, num_layers=2, dropout=p, batch_first=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.lstm(x)[0]


def modules(p: float) -> nn.Module:
    blocks = (nn.Sequential(nn.Linear(8, 8), nn.Dropout(p), nn.Linear(8, 8)) for _ in range(3))
    return nn.Sequential(*blocks)


def attention(p: float) -> nn.Module:
    return nn.TransformerEncoderLayer(8, 2, 16, dropout=p, batch_first=True)


MODELS = [modules, attention, Functions, Recurrent]


def gradients(model: nn.Module, x: torch.Tensor) -> list[torch.Tensor]:
    model.zero_grad()
    loss = model(x).square().sum()
    loss.backward()
    return [loss.detach(), *(weight.grad.clone() for weight in model.parameters() if weight.grad is not None)]


@pytest.mark.parametrize("checkpoint", ["as written", "every 1", "sqrt"])
@pytest.mark.parametrize("make", MODELS)
def test_loss_and_gradients_are_those_of_a_model_without_dropout(make: type[nn.Module], checkpoint: str) -> None:
    torch.manual_seed(0)
    model, x = make(0.5), torch.randn(2, 4, 8)
    without = make(0.0)
    without.load_state_dict(model.state_dict())
    expected = gradients(without, x)
    with apply(OFF.replace(checkpoint=checkpoint), model):
        torch.testing.assert_close(gradients(model, x), expected)
    assert not torch.equal(gradients(model, x)[0], expected[0])


def test_other_models_keep_their_dropout() -> None:
    model, other, x = modules(0.5), modules(0.5), torch.ones(1, 8)
    with apply(OFF, model):
        assert torch.equal(model(x), model(x))
        assert not torch.equal(other(x), other(x))


@contextlib.contextmanager
def steps(make: type[nn.Module]) -> Iterator[tuple[Step, Step]]:
    """Yield a step with dropout, and the same step without."""
    torch.manual_seed(0)
    batch = torch.zeros(4, 16, 8)
    yield tuple(Step(make(p), batch, loss=torch.mean) for p in (0.5, 0.0))  # type: ignore[misc]


@pytest.mark.parametrize("make", MODELS)
def test_a_run_requests_what_a_model_without_dropout_requests(make: type[nn.Module]) -> None:
    with steps(make) as (step, without):
        off, written = run(step, OFF, machine_of("T4")), run(step, machine=machine_of("T4"))
        plain = run(without, machine=machine_of("T4"))
    assert off.applied.texts == ("dropout off",)
    assert off.tape.size.tolist() == plain.tape.size.tolist()
    assert off.tape.action.tolist() == plain.tape.action.tolist()
    # A mask is kept for each call.
    assert len(written.tape) > len(off.tape)


def test_the_lines_do_the_same_for_modules() -> None:
    with steps(modules) as (step, without):
        names = {"model": step.model}
        exec(lines(step, OFF), names)
        changed, plain = run(step, machine=machine_of("T4")), run(without, machine=machine_of("T4"))
    assert changed.tape.size.tolist() == plain.tape.size.tolist()


def test_it_is_on_the_command_line_and_in_an_explorer() -> None:
    assert knobs_of(["dropout=off"]) == OFF
    (control,) = (one for one in controls_of(Explored()) if one.field == "dropout")
    assert control.updated(Knobs(), control.positions(Knobs())[1].value) == OFF
