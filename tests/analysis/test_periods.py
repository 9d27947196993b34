"""Periods of programs: steps of an optimizer, and iterations of loops that have none."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import nn

from memexplore import simulate
from memexplore.analysis.growth import leak
from memexplore.analysis.periods import periods
from memexplore.analysis.verdict_content import verdict_content
from memexplore.tape import Tape
from tests.sample_tapes import MIB

_KEPT = 2 * MIB
"""Bytes that a loop keeps in each iteration: float32[512, 1024]."""


def _model() -> nn.Module:
    return nn.Sequential(nn.Linear(1024, 1024), nn.ReLU(), nn.Linear(1024, 1024)).cuda()


def _batch() -> torch.Tensor:
    return torch.zeros(512, 1024, device="cuda")


def _evaluate() -> None:
    model, results = _model(), []
    with torch.no_grad():
        for _ in range(6):
            results.append(model(_batch()))


def _evaluate_in_a_function() -> None:
    def loop(model: nn.Module, results: list[torch.Tensor]) -> None:
        for _ in range(6):
            batch = _batch()
            results.append(
                model(
                    batch,
                )
            )

    results: list[torch.Tensor] = []
    with torch.no_grad():
        loop(_model(), results)


def _update_by_hand() -> None:
    model, losses = _model(), []
    for _ in range(6):
        output = model(_batch())
        output.sum().backward()
        with torch.no_grad():
            for weight in model.parameters():
                weight -= 0.1 * weight.grad
        losses.append(output.detach())


def _evaluate_after_training() -> None:
    model, results = _model(), []
    optimizer = torch.optim.SGD(model.parameters())
    for _ in range(20):
        model(_batch()).sum().backward()
        optimizer.step()
    with torch.no_grad():
        for _ in range(6):
            results.append(model(_batch()))


def _epochs() -> None:
    model, results = _model(), []
    for _ in range(2):
        for _ in range(3):
            batch = _batch()
            output = model(batch)
            output.sum().backward()
            results.append(output.detach())


def _epochs_in_functions() -> None:
    def epoch(model: nn.Module, results: list[torch.Tensor]) -> None:
        for _ in range(2):
            batch = _batch()
            with torch.no_grad():
                results.append(model(batch))

    model, results = _model(), []
    for _ in range(3):
        model.train()
        epoch(model, results)


@pytest.mark.parametrize(
    "run",
    [
        _evaluate,
        _evaluate_in_a_function,
        _update_by_hand,
        _evaluate_after_training,
        _epochs,
        _epochs_in_functions,
    ],
)
def test_a_loop_without_steps_that_keeps_its_results_grows(run: Callable[[], None]) -> None:
    # 6 x 2 MiB are more than a thousandth of the memory, so there is an end in sight.
    tape = simulate(run, gpu="1GiB")
    # The sixth iteration includes the end of the program, which frees everything.
    assert (periods(tape).unit, periods(tape).numbers) == ("iteration", [1, 2, 3, 4, 5])
    found = leak(tape)
    assert found is not None
    assert (found.bytes_per_period, found.rate) == (_KEPT, "2.00 MiB an iteration")
    # Of the five finished ones, after which a sixth block was kept.
    assert sum(tape.size[list(found.kept)]) == 0
    assert "grows 2.00 MiB an iteration" in verdict_content(tape).headline


def test_the_blocks_of_all_places_that_grow_are_kept() -> None:
    def run() -> None:
        model, images, results = _model(), [], []
        with torch.no_grad():
            while True:
                images.append(_batch())
                results.append(model(images[-1]))

    tape = simulate(run, gpu="256MiB")
    found = leak(tape)
    assert found is not None
    # Of each iteration that has ended an input of 2 MiB and a result of 2 MiB.
    ended = len(periods(tape).ends)
    assert ended > 20
    assert (found.bytes_per_period, len(found.kept)) == (2 * _KEPT, 2 * ended)
    assert int(tape.size[list(found.kept)].sum()) == 2 * _KEPT * ended


def test_calls_with_a_graph_in_one_line_are_iterations() -> None:
    def run() -> None:
        model, head, batch, results = _model(), _model(), _batch(), []
        for _ in range(6):
            results.append(head(model(batch)))

    tape = simulate(run, gpu="1GiB")
    assert (periods(tape).unit, periods(tape).numbers) == ("iteration", [1, 2, 3, 4, 5])
    found = leak(tape)
    assert found is not None
    # Each model keeps the results of its second and its third layer.
    assert found.bytes_per_period == 4 * _KEPT


def _no_growth() -> None:
    model = _model()
    with torch.no_grad():
        for _ in range(6):
            model(_batch())


def _layers_of_a_forward_pass() -> None:
    layers = [nn.Linear(1024, 1024).cuda() for _ in range(8)]
    output = _batch()
    for layer in layers:
        output = layer(output)
    output.sum().backward()


def _model_built_in_a_loop() -> None:
    layers = []
    for _ in range(8):
        layer = nn.Linear(1024, 1024)
        layers.append(layer.cuda())
    nn.Sequential(*layers)(_batch())


def _layers_in_a_module() -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(1024, 1024)

        def forward(self, value: torch.Tensor) -> torch.Tensor:
            for _ in range(8):
                value = self.layer(value).relu()
            return value

    Net().cuda()(_batch()).sum().backward()


@pytest.mark.parametrize("run", [_no_growth, _layers_of_a_forward_pass, _model_built_in_a_loop, _layers_in_a_module])
def test_what_a_pass_or_a_constructor_does_several_times_is_no_growth(run: Callable[[], None]) -> None:
    assert leak(simulate(run, gpu="1GiB")) is None


def _accumulation(steps: int) -> Tape:
    def run() -> None:
        model = _model()
        optimizer = torch.optim.SGD(model.parameters())
        for _ in range(steps):
            total = torch.zeros((), device="cuda")
            for _ in range(4):
                total = total + model(_batch()).sum()
            total.backward()
            optimizer.step()

    return simulate(run, gpu="1GiB")


def test_calls_within_the_steps_of_an_optimizer_are_no_periods() -> None:
    tape = _accumulation(4)
    # The last rows of step 4 free what the program has.
    assert (periods(tape).unit, periods(tape).numbers) == ("step", [1, 2, 3])
    assert leak(tape) is None


def test_a_tape_without_stacks_has_no_iterations() -> None:
    tape = simulate(_evaluate, gpu="1GiB")
    bare = tape.replace(stacks=(), stack=np.full(len(tape), -1, np.int32))
    assert (periods(bare).unit, leak(bare)) == ("step", None)


def test_growth_whose_end_is_not_in_sight_is_not_mentioned() -> None:
    # 14.5 GiB / 2 MiB are more than a thousand times the five iterations that have ended.
    assert leak(simulate(_evaluate, gpu="T4")) is None
