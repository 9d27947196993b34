"""A tape that reuses a trace equals the traced one row for row, on every model family."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from memexplore.recorder.events import Event
from memexplore.recorder.recorder import Recorder
from memexplore.run.knobs.applying.on_machine import on_machine
from memexplore.run.knobs.knobs import Knobs
from memexplore.run.machine import machine_of
from memexplore.run.programs.step import Step
from memexplore.run.programs.step_run import traced
from memexplore.run.run import run
from memexplore.tape import Action, Phase, Tape
from tests.families import FAMILIES
from tests.workspaces import estimate_workspaces_of_relu, possible_workspaces

pytest.importorskip("transformers")
GPU = "A100-80GB"


def graphs(batch: Any, samples: int) -> Any:
    """Return copies of the first graph side by side, as one graph."""
    features, edges, labels, labelled = (value[:200] if value.shape[0] != 2 else value[:, :1000] for value in batch)
    shifted = torch.cat([edges + 200 * number for number in range(samples)], 1)
    return features.repeat(samples, 1), shifted, labels.repeat(samples), labelled.repeat(samples)


def visits(batch: Any, samples: int) -> Any:
    """Return visits with three entries of each category."""
    return (
        torch.zeros(samples, 8),
        torch.zeros(4, 3 * samples, dtype=torch.long),
        torch.arange(0, 3 * samples, 3),
        torch.zeros(samples),
    )


RESIZED = {"graph": {"samples": 1, "resize": graphs}, "recommender": {"resize": visits}}
"""Arguments of `Step` for batches whose samples do not lie along the first dimension."""


@functools.cache
def step_of(name: str) -> Step:
    family = FAMILIES[name]

    def loss(model: nn.Module, batch: Any) -> Iterator[torch.Tensor]:
        return family.losses(model, batch)

    return Step(lambda: family.build().train(), family.batch("cpu"), compute_loss=loss, **RESIZED.get(name, {}))


def same(step: Step, knobs: Knobs) -> None:
    reused = run(step, knobs, machine_of(GPU))
    from_scratch = traced(step, knobs, on_machine(knobs, machine_of(GPU)))
    assert reused.tape.equals(from_scratch.tape)
    assert reused.tape.meta == from_scratch.tape.meta
    assert reused.applied == from_scratch.applied
    assert reused.cost == from_scratch.cost


@pytest.mark.parametrize("name", sorted(FAMILIES))
def test_reused_trace_is_that_of_a_run(name: str) -> None:
    step = step_of(name)
    run(step, machine=machine_of(GPU))
    same(step, Knobs(settings="expandable_segments:True"))
    same(step, Knobs(batch=2 * step.batch_size))
    same(step, Knobs(batch=step.batch_size + 1))


@pytest.mark.parametrize("name", ["gan", "graph", "recommender"])
@pytest.mark.parametrize("knobs", [Knobs(precision="bf16"), Knobs(accumulation=2), Knobs(mode="inference")], ids=str)
def test_reused_trace_of_unusual_steps_in_every_loop(name: str, knobs: Knobs) -> None:
    step = step_of(name)
    batch = 2 * step.batch_size
    run(step, knobs.replace(batch=batch), machine_of(GPU))
    same(step, knobs.replace(batch=2 * batch))


def test_several_losses_go_backward_one_after_the_other() -> None:
    tape = run(step_of("gan"), machine=machine_of(GPU)).tape
    first = (tape.action == Action.MARK) & (tape.step == 1)
    # Three models are called for the discriminator's loss, then one for the generator's; then one optimizer.
    assert [Phase(phase).text for phase in tape.phase[first]] == [
        *["forward"] * 3, "backward", "forward", "backward", "optimizer", "other",
    ]  # fmt: skip


def deep(width: int = 64) -> Step:
    model = nn.Sequential(*(nn.Sequential(nn.Linear(width, width), nn.ReLU()) for _ in range(6)))
    return Step(model, torch.zeros(8, width), loss=torch.mean)


def test_only_the_first_step_is_traced(monkeypatch: pytest.MonkeyPatch) -> None:
    step = deep()
    run(step, machine=machine_of(GPU))
    phases = []
    alloc = Recorder.alloc
    monkeypatch.setattr(Recorder, "alloc", lambda self, *rest: phases.append(self.step) or alloc(self, *rest))
    tape = run(step, Knobs(batch=16), machine_of(GPU)).tape
    assert set(phases) == {0, 1}
    assert set(tape.step.tolist()) == {0, 1, 2}


def test_second_step_of_fsdp2_follows_from_the_first(monkeypatch: pytest.MonkeyPatch) -> None:
    # It allocates gathered parameters in the first step, and resizes their storages in each later one.
    step, shards = deep(), Knobs(gpus=2, strategy="fsdp2")
    run(step, shards, machine_of(GPU))
    assert phases_traced(monkeypatch, step, shards.replace(batch=16)) <= {Phase.FORWARD, Phase.BACKWARD, Phase.OTHER}
    same(step, shards.replace(batch=24))


def phases_traced(monkeypatch: pytest.MonkeyPatch, step: Step, knobs: Knobs) -> set[Phase]:
    """Return the phases of a run that are traced, while the run with another batch is known."""
    run(step, knobs.replace(batch=8), machine_of(GPU))
    recorders: list[Recorder] = []
    finish = Recorder.finish
    monkeypatch.setattr(Recorder, "finish", lambda self: recorders.append(self) or finish(self))
    run(step, knobs.replace(batch=16), machine_of(GPU))
    monkeypatch.undo()
    same(step, knobs.replace(batch=32))
    return {Phase(Event(*event).phase) for event in recorders[0].events}


class OwnAdam(torch.optim.Adam):
    pass


def hooked(parameters: Any) -> torch.optim.Optimizer:
    optimizer = torch.optim.Adam(parameters)
    optimizer.register_step_pre_hook(lambda *_: None)
    return optimizer


def test_update_by_an_optimizer_of_torch_is_traced_once(monkeypatch: pytest.MonkeyPatch) -> None:
    assert Phase.OPTIMIZER not in phases_traced(monkeypatch, deep(), Knobs())


def test_update_of_a_weight_of_two_layers_is_traced_once(monkeypatch: pytest.MonkeyPatch) -> None:
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64))
    model[2].weight = model[0].weight
    step = Step(model, torch.zeros(8, 64), loss=torch.mean, optimizer=torch.optim.Adam)
    assert Phase.OPTIMIZER not in phases_traced(monkeypatch, step, Knobs())
    assert run(step, Knobs(batch=16), machine_of(GPU)).tape.meta.notes == (
        "0 and 2 share a weight, which counts as memory of 0",
    )


@pytest.mark.parametrize("optimizer", [OwnAdam, hooked])
def test_update_by_code_of_the_users_is_always_traced(monkeypatch: pytest.MonkeyPatch, optimizer: Any) -> None:
    step = Step(deep().model, torch.zeros(8, 64), loss=torch.mean, optimizer=optimizer)
    assert Phase.OPTIMIZER in phases_traced(monkeypatch, step, Knobs())


@pytest.mark.parametrize(
    "knobs",
    [
        Knobs(precision="fp16", batch=16),
        Knobs(optimizer="SGD with momentum", update="per tensor", batch=16),
        Knobs(zero_grad="set to zero", batch=16),
        Knobs(accumulation=4, batch=16),
        Knobs(mode="inference", batch=16),
        Knobs(settings="max_split_size_mb:32", batch=16),
    ],
    ids=str,
)
def test_reused_trace_of_every_loop(knobs: Knobs) -> None:
    step = deep()
    run(step, knobs.replace(batch=8), machine_of(GPU))
    same(step, knobs)


def test_a_first_step_with_other_requests_is_traced() -> None:
    def loss(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
        # From sixteen samples on, twice as deep.
        return model(model(batch) if len(batch) >= 16 else batch).mean()

    step = Step(deep().model, torch.zeros(8, 64), compute_loss=loss)
    run(step, machine=machine_of(GPU))
    same(step, Knobs(batch=16))


def test_a_second_step_with_other_requests_than_the_first_is_always_traced() -> None:
    calls: list[int] = []

    def loss(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
        calls.append(len(batch))
        # Every second call has an output of another shape, which matches no request of the first step.
        return model(batch).mean() if len(calls) % 2 else model(torch.cat([batch, batch])).sum()

    step = Step(deep().model, torch.zeros(8, 64), compute_loss=loss)
    run(step, machine=machine_of(GPU))
    assert len(calls) == 2
    same(step, Knobs(batch=16))


def texts(tape: Tape, step: int) -> list[str]:
    """Shape and dtype of the tensor of each request of a step, "" where unknown."""
    rows = (tape.action == Action.ALLOC) & (tape.step == step)
    return [tape.tensor_texts[number] if number >= 0 else "" for number in tape.tensor[rows].tolist()]


def test_reused_steps_have_the_shapes_of_their_batch() -> None:
    step = deep()
    run(step, machine=machine_of(GPU))
    for number in (1, 2):
        found = texts(run(step, Knobs(batch=16), machine_of(GPU)).tape, number)
        assert "float32[16, 64]" in found
        assert "float32[8, 64]" not in found


def test_shape_is_unknown_where_the_two_traced_steps_have_different_ones() -> None:
    calls: list[int] = []

    def loss(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
        calls.append(len(batch))
        # Every second call has a tensor of the same size and of another shape.
        shape = (len(batch), 6) if len(calls) % 2 else (6, len(batch))
        return model(batch).mean() + torch.ones(shape, device=batch.device).mean()

    step = Step(deep().model, torch.zeros(8, 64), compute_loss=loss)
    first = run(step, machine=machine_of(GPU)).tape
    assert "float32[8, 6]" in texts(first, 1)
    assert "float32[6, 8]" in texts(first, 2)
    tape = run(step, Knobs(batch=16), machine_of(GPU)).tape
    assert len(calls) == 3  # step 2 of the second run is not traced
    assert "float32[16, 6]" in texts(tape, 1)
    assert not {"float32[16, 6]", "float32[6, 16]", "float32[6, 8]"} & set(texts(tape, 2))
    size = 16 * 6 * 4
    unknown = (tape.step == 2) & (tape.action == Action.ALLOC) & (tape.size == size)
    assert tape.tensor[unknown].tolist() == [-1]


def test_optimizer_state_is_allocated_in_the_first_step_only() -> None:
    step = deep()
    run(step, machine=machine_of(GPU))
    tape = run(step, Knobs(batch=32), machine_of(GPU)).tape
    made = (tape.phase == Phase.OPTIMIZER) & (tape.action == Action.ALLOC)
    # The first step has two states of each of 12 weights; both steps have the temporaries of foreach.
    assert np.count_nonzero(made & (tape.step == 1)) - np.count_nonzero(made & (tape.step == 2)) == 24


# -- workspaces whose sizes are estimates


def test_reused_steps_have_the_possible_workspaces_of_their_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    estimate_workspaces_of_relu(monkeypatch)
    step = deep()
    run(step, machine=machine_of(GPU))
    same(step, Knobs(batch=16))
    same(step, Knobs(batch=8, settings="expandable_segments:True"))
    size = 16 * 64 * 4
    tape = run(step, Knobs(batch=16), machine_of(GPU)).tape
    # six ReLUs in each of two steps
    assert possible_workspaces(tape) == [(size, (size, 0, 2 * size))] * 12
    assert tape.workspaces == ((size, 0, 2 * size),)
