"""Batches on which ops take other scratch memory: derived from an earlier trace, and equal to a run."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from memexplore.recorder.recorder import Recorder
from memexplore.run.knobs.knobs import Knobs
from memexplore.run.machine import machine_of
from memexplore.run.programs.step import Step
from memexplore.run.run import run
from memexplore.tape import Action, Phase, Tape
from tests.programs.test_trace_reuse import GPU, OwnAdam, same
from tests.workspaces import CUBLAS, CUBLASLT, estimate_workspaces_of_relu, possible_workspaces

SMALL, LARGE = 8, 4096


def net() -> Step:
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64))
    return Step(model, torch.zeros(SMALL, 64), loss=torch.mean)


def steps_traced(monkeypatch: pytest.MonkeyPatch, step: Step, knobs: Knobs) -> set[int]:
    """Return the steps of a run that are traced; 0 is the set-up."""
    numbers: set[int] = set()
    alloc = Recorder.alloc
    monkeypatch.setattr(Recorder, "alloc", lambda self, *rest: numbers.add(self.step) or alloc(self, *rest))
    run(step, knobs, machine_of(GPU))
    monkeypatch.undo()
    return numbers


def scratch(tape: Tape, step: int) -> list[int]:
    """Bytes of the blocks without a tensor of a step's forward and backward, without the workspaces that are kept."""
    rows = (tape.action == Action.ALLOC) & (tape.step == step) & (tape.tensor < 0) & (tape.phase != Phase.OPTIMIZER)
    sizes = tape.size[rows].tolist()
    return [size for size in sizes if size not in (CUBLAS, CUBLASLT)]


def test_large_sums_take_scratch_memory_in_both_steps() -> None:
    small, large = (run(net(), Knobs(batch=batch), machine_of(GPU)).tape for batch in (SMALL, LARGE))
    # The mean, and the sums for the gradients of two biases: partial results, and a counter.
    assert [len(scratch(small, number)) for number in (1, 2)] == [0, 0]
    assert [len(scratch(large, number)) for number in (1, 2)] == [6, 6]


@pytest.mark.parametrize(("first", "second"), [(SMALL, LARGE), (LARGE, SMALL)])
def test_second_step_is_not_traced_where_only_scratch_memory_differs(
    monkeypatch: pytest.MonkeyPatch, first: int, second: int
) -> None:
    step = net()
    run(step, Knobs(batch=first), machine_of(GPU))
    assert steps_traced(monkeypatch, step, Knobs(batch=second)) == {0, 1}
    same(step, Knobs(batch=second))
    # The trace with the other scratch requests is kept.
    same(step, Knobs(batch=2 * second))


def test_scratch_memory_has_no_possible_workspace_of_the_op_that_takes_it(monkeypatch: pytest.MonkeyPatch) -> None:
    estimate_workspaces_of_relu(monkeypatch, scratch_from=LARGE * 64 * 4)
    step = net()
    run(step, Knobs(batch=SMALL), machine_of(GPU))
    same(step, Knobs(batch=LARGE))
    tape = run(step, Knobs(batch=LARGE), machine_of(GPU)).tape
    assert possible_workspaces(tape) == [(LARGE * 64 * 4, (0, LARGE * 64 * 4))] * 2


@pytest.mark.parametrize(
    "knobs", [Knobs(accumulation=2), Knobs(checkpoint="every 1"), Knobs(precision="bf16")], ids=str
)
def test_scratch_memory_of_every_loop(knobs: Knobs) -> None:
    step = net()
    run(step, knobs, machine_of(GPU))
    same(step, knobs.replace(batch=LARGE))
    same(step, knobs.replace(batch=SMALL * 2))


@pytest.mark.parametrize("optimizer", [torch.optim.SGD, torch.optim.Adam, OwnAdam])
def test_scratch_memory_before_the_update_of_any_optimizer(optimizer: Any) -> None:
    step = Step(net().model, torch.zeros(SMALL, 64), loss=torch.mean, optimizer=optimizer)
    run(step, machine=machine_of(GPU))
    same(step, Knobs(batch=LARGE))


def test_an_op_that_the_second_step_does_not_have_is_traced() -> None:
    calls: list[int] = []

    def loss(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
        calls.append(len(batch))
        # Only every first call takes the sum, which needs scratch memory of its own from some size on.
        return model(batch).mean() + (batch.sum() if len(calls) % 2 else 0)

    step = Step(net().model, torch.zeros(SMALL, 64), compute_loss=loss)
    run(step, machine=machine_of(GPU))
    same(step, Knobs(batch=LARGE))


def test_all_batches_of_a_range_are_equal_to_runs() -> None:
    step = net()
    for batch in np.unique(np.geomspace(1, 1 << 20, 24).astype(int)).tolist():
        same(step, Knobs(batch=batch))
