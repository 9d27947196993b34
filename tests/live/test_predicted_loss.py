"""Predictions of loops in other people's style: the loss is the loop's, and variables live as long as there."""

from __future__ import annotations

import inspect
import multiprocessing
import weakref
from typing import Any

import pytest
import torch
from torch import nn

import memexplore as mx
from memexplore.live import step_copy
from memexplore.live.prediction import Prediction
from memexplore.run.knobs.knobs import Knobs
from tests.live.test_prediction import SECONDS


class Named(dict):
    """An output with names, as models of transformers return it."""


class WithLoss(nn.Module):
    """Returns its loss beside a large output, which the loss does not keep."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.outer = nn.Linear(64, 256), nn.Linear(256, 4096)

    def forward(self, x: torch.Tensor) -> Named:
        logits = self.outer(self.inner(x).relu())
        return Named(loss=logits.sum(), logits=logits)


def of_loop(holds: bool, is_named: bool) -> Prediction:
    with mx.virtual("T4"):
        model = WithLoss().cuda()
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        with mx.watch(*((model, optimizer) if is_named else ())) as live:
            for _ in range(4):
                outputs = model(torch.ones(512, 64, device="cuda"))
                loss, logits = outputs["loss"], outputs["logits"]
                del outputs
                if not holds:
                    del logits
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
            return live.predict(Knobs(), SECONDS)


@pytest.mark.parametrize("is_named", [True, False], ids=["named", "unnamed"])
@pytest.mark.parametrize("holds", [True, False], ids=["held", "dropped"])
def test_an_output_that_the_loop_holds_is_held_in_the_prediction(holds: bool, is_named: bool):
    found = of_loop(holds, is_named)
    assert found.unchanged_peak == found.measured_peak


# --- the loss of the loop --------------------------------------------------------------------------------------------


class Classifier(nn.Module):
    """Returns logits: 512 samples of 4096 classes are 8 MiB, and cross entropy keeps as much for backward."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.outer = nn.Linear(64, 256), nn.Linear(256, 4096)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.outer(self.inner(x).relu())


def batch_of() -> tuple[torch.Tensor, torch.Tensor]:
    return torch.ones(512, 64, device="cuda"), torch.zeros(512, dtype=torch.long, device="cuda")


def statements(model: nn.Module, optimizer: torch.optim.Optimizer, live: Any) -> None:
    for _ in range(4):
        x, y = batch_of()
        logits = model(x)
        loss = nn.functional.cross_entropy(logits, y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()


def function_of_the_loss(model: nn.Module, optimizer: torch.optim.Optimizer, live: Any) -> None:
    criterion = nn.CrossEntropyLoss(label_smoothing=0.1)

    def loss_of(batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        x, y = batch
        logits = model(x)
        return criterion(logits, y)

    for _ in range(4):
        batch = batch_of()
        loss_of(batch).backward()
        optimizer.step()
        optimizer.zero_grad()


def function_of_the_step(model: nn.Module, optimizer: torch.optim.Optimizer, live: Any) -> None:
    def train(x: torch.Tensor, y: torch.Tensor) -> float:
        optimizer.zero_grad()
        probabilities = model(x).log_softmax(-1)
        loss = nn.functional.nll_loss(probabilities, y)
        loss.backward()
        optimizer.step()
        return loss.item()

    for _ in range(4):
        train(*batch_of())


def autocast_around_the_model(model: nn.Module, optimizer: torch.optim.Optimizer, live: Any) -> None:
    for _ in range(4):
        x, y = batch_of()
        with live.autocast(torch.float16):
            logits = model(x)
        loss = nn.functional.cross_entropy(logits.float(), y)
        live.backward(loss)
        live.step(optimizer)
        optimizer.zero_grad()


def micro_batches(model: nn.Module, optimizer: torch.optim.Optimizer, live: Any) -> None:
    for _ in range(4):
        for x, y in live.micro_batches(batch_of()):
            loss = nn.functional.cross_entropy(model(x), y)
            live.backward(loss)
        live.step(optimizer)
        optimizer.zero_grad()


LOOPS = (statements, function_of_the_loss, function_of_the_step, autocast_around_the_model, micro_batches)


def of_classifier(loop: Any, knobs: Knobs = Knobs()) -> Prediction:  # noqa: B008
    with mx.virtual("T4"):
        model = Classifier().cuda()
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        with mx.watch(model, optimizer) as live:
            loop(model, optimizer, live)
            return live.predict(knobs, SECONDS)


@pytest.mark.parametrize("loop", LOOPS, ids=lambda loop: loop.__name__)
def test_the_loss_is_computed_as_the_loop_does(loop: Any):
    found = of_classifier(loop)
    assert found.assumed == ()
    assert found.unchanged_peak == found.measured_peak


@pytest.mark.parametrize("precision", ["fp16", "off"])
def test_a_precision_that_the_loop_follows_has_the_peak_that_is_measured(precision: str):
    with mx.virtual("T4"):
        model = Classifier().cuda()
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        with mx.watch(model, optimizer) as live:
            autocast_around_the_model(model, optimizer, live)
            live.knobs = Knobs(precision=precision)
            autocast_around_the_model(model, optimizer, live)
            found = live.predict(live.knobs, SECONDS)
    # The loss is outside of the autocast. The scale of gradients takes 512 B more in a loop of its own.
    assert found.peak_allocated == pytest.approx(found.measured_peak, abs=4096)


def test_a_loss_whose_lines_cannot_be_read_is_assumed_and_said_so():
    names: dict[str, Any] = {"nn": nn, "torch": torch, "Any": Any, "batch_of": batch_of}
    exec(inspect.getsource(statements), names)
    found = of_classifier(names["statements"])
    assert found.assumed == (step_copy.LOSS_ASSUMED,)


def test_a_prediction_keeps_no_variable_of_the_loop_alive():
    with mx.virtual("T4"):
        model = Classifier().cuda()
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        with mx.watch(model, optimizer) as live:
            for number in range(3):
                x, y = batch_of()
                seen = weakref.ref(x)
                nn.functional.cross_entropy(model(x), y).backward()
                optimizer.step()
                optimizer.zero_grad()
                if number:
                    live.predict(Knobs(), SECONDS)
                x = y = None
                assert seen() is None


def only_here(loss: torch.Tensor) -> torch.Tensor:
    if multiprocessing.parent_process() is not None:
        raise RuntimeError("another process")
    return loss


def loss_of_one_process(model: nn.Module, optimizer: torch.optim.Optimizer, live: Any) -> None:
    for _ in range(4):
        x, y = batch_of()
        loss = only_here(nn.functional.cross_entropy(model(x), y))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()


def test_lines_that_cannot_be_run_are_named_with_their_error():
    found = of_classifier(loss_of_one_process)
    assert found.assumed == (step_copy.LINES_FAILED.format("RuntimeError: another process"), step_copy.LOSS_ASSUMED)


class ReturnsItself(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(64, 4)

    def forward(self, parts: list[Any]) -> list[Any]:
        found: list[Any] = [self.inner(parts[0])]
        found.append(found)
        return found


def test_lists_that_contain_themselves_are_watched():
    with mx.virtual("T4"):
        model = ReturnsItself().cuda()
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        with mx.watch(model, optimizer) as live:
            for _ in range(3):
                given: list[Any] = [torch.ones(8, 64, device="cuda")]
                given.append(given)
                model(given)[0].sum().backward()
                optimizer.step()
                optimizer.zero_grad()
    assert live.steps()["step"].tolist() == [1, 2, 3]
    assert not live.notes
