"""One run of a step with knobs: sizes and FLOPs by hand, and the model restored."""

from __future__ import annotations

import gc
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import memexplore as mx
from memexplore.hardware import catalogue
from memexplore.recorder.recorder import Recorder
from memexplore.run.knobs.knobs import Knobs
from memexplore.run.machine import machine_of
from memexplore.run.programs.step import Step
from memexplore.run.programs.step_run import traced
from memexplore.run.run import run
from memexplore.tape import Action, Category, Phase

KIB, MIB = 1024, 1024**2


def network() -> nn.Sequential:
    return nn.Sequential(nn.Linear(256, 512), nn.BatchNorm1d(512), nn.ReLU(), nn.Dropout(0.1), nn.Linear(512, 256))


def squares(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return (output - target).pow(2).mean()


def step_of(model: Any = None, batch: int = 8, **changes: Any) -> Step:
    model = network() if model is None else model
    return Step(model, (torch.zeros(batch, 256), torch.zeros(batch, 256)), loss=squares, **changes)


def size_of(tape: Any, category: Category) -> int:
    return int(tape.size[(tape.category == category) & (tape.action == Action.ALLOC) & (tape.step <= 1)].sum())


def test_two_steps_with_parameters_gradients_and_state():
    tape = run(step_of(optimizer=torch.optim.AdamW)).tape
    # 256*512 + 512, 2*512 of the norm, 512*256 + 256, in fp32
    weights = (256 * 512 + 512 + 2 * 512 + 512 * 256 + 256) * 4
    assert size_of(tape, Category.PARAMETER) == weights
    assert size_of(tape, Category.GRADIENT) == weights
    assert size_of(tape, Category.OPTIMIZER_STATE) == 2 * weights
    assert sorted({int(step) for step in tape.step}) == [0, 1, 2]
    assert {Phase(int(phase)) for phase in tape.phase[tape.step == 2]} == set(Phase)


def test_batch_of_twice_the_size_has_activations_of_twice_the_size():
    step = step_of()
    once, twice = (size_of(run(step, Knobs(batch=batch)).tape, Category.INPUT) for batch in (8, 16))
    assert once == 2 * 2 * 8 * 256 * 4  # input and target, of the first step and, just before it begins, the second
    assert twice == 2 * once


def test_flops_are_those_of_the_matrix_products_of_one_step():
    # forward, gradient of the weight, and of the input except in the first layer; a multiply-add is 2 operations
    one = 2 * 8 * 256 * 512
    assert run(step_of()).cost.flops == 2 * one + 2 * one + 1 * one


def test_a_checkpointed_step_computes_up_to_a_third_more():
    step = Step(
        lambda: nn.Sequential(*(nn.Sequential(nn.Linear(64, 64), nn.GELU()) for _ in range(16))),
        (torch.zeros(8, 64), torch.zeros(8, 64)),
        loss=squares,
    )
    # A backward pass is twice a forward pass, but for the input of the first layer, and each block runs forward once
    # more at most.
    more = run(step, Knobs(checkpoint="every 1")).cost.flops / run(step).cost.flops
    assert 1.3 < more < 4 / 3 + 0.02


def test_slower_gpu_takes_longer():
    cost = run(step_of(batch=4096)).cost
    assert cost.seconds(catalogue.find("T4")) > cost.seconds(catalogue.find("H100-SXM"))


def test_out_of_memory_ends_the_tape():
    tape = run(step_of(), machine=machine_of("2MiB")).tape
    assert (tape.action == Action.OOM).sum() == 1


def state(model: nn.Module) -> list[Any]:
    tensors = [*model.parameters(), *model.buffers()]
    values = [(id(tensor), tensor.clone(), tensor.grad, tensor.requires_grad, type(tensor)) for tensor in tensors]
    return [values, model.training, torch.get_rng_state(), list(model.state_dict()), model.__dict__.keys()]


def assert_same(before: list[Any], after: list[Any]) -> None:
    for mine, its in zip(before[0], after[0], strict=True):
        assert mine[0] == its[0]
        assert torch.equal(mine[1], its[1])
        assert mine[2] is its[2]
        assert mine[3:] == its[3:]
    assert before[1] == after[1]
    assert torch.equal(before[2], after[2])
    assert before[3:] == after[3:]


@pytest.mark.parametrize("gpu", ["T4", "2MiB"])
def test_real_model_is_restored(gpu):
    model = network()
    squares(model(torch.ones(8, 256)), torch.ones(8, 256)).backward()
    model.eval()
    model[0].weight.requires_grad_(False)
    before = state(model)
    run(step_of(model), Knobs(precision="bf16"), machine_of(gpu))
    assert_same(before, state(model))


def test_model_is_restored_after_an_error():
    model = network()
    before = state(model)
    with pytest.raises(ValueError, match="divisors"):
        run(step_of(model), Knobs(accumulation=3))
    assert_same(before, state(model))


def test_model_on_another_virtual_gpu_stays_there():
    with mx.virtual("T4"):
        model = network().cuda()
    assert run(step_of(model)).tape.equals(run(step_of(network())).tape)
    with mx.virtual("T4"):
        assert all(weight.is_cuda for weight in model.parameters())
        model(torch.zeros(8, 256, device="cuda")).sum().backward()


@pytest.mark.usefixtures("unfrozen_objects")
def test_older_objects_are_not_scanned_during_a_run():
    frozen = []

    def loss(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        frozen.append(gc.get_freeze_count())
        return squares(output, target)

    run(Step(network, (torch.zeros(8, 256), torch.zeros(8, 256)), loss=loss))
    # Python 3.12 begins with some 400; torch alone makes a hundred thousand.
    assert min(frozen) > 100_000
    assert gc.get_freeze_count() < 1_000


def test_building_function_is_called_once():
    calls = []
    step = step_of(lambda: calls.append(1) or network())
    run(step)
    run(step, Knobs(batch=4))
    assert calls == [1]


def test_a_setting_that_was_traced_is_not_run_again(monkeypatch):
    step = step_of()
    first = run(step, machine=machine_of("A100-40GB")).tape
    monkeypatch.setattr(Recorder, "alloc", lambda *_: pytest.fail("an op was traced"))
    assert run(step, machine=machine_of("A100-40GB")).tape.equals(first)
    elsewhere = run(step, machine=machine_of("A100-80GB")).tape
    assert elsewhere.meta.capacity == catalogue.find("A100-80GB").capacity
    assert (elsewhere.size == first.size).all()


def test_a_setting_that_does_not_fit_a_smaller_gpu_is_traced_there():
    step = step_of()
    run(step, machine=machine_of("24GiB"))
    assert run(step, machine=machine_of("2MiB")).tape.equals(traced(step, Knobs(), machine_of("2MiB")).tape)


def test_code_that_reads_the_memory_of_the_gpu_is_traced_on_every_gpu():
    def careful(model: nn.Module, batch: Any) -> torch.Tensor:
        part = 4 if torch.cuda.get_device_properties(0).total_memory < 8 * KIB * MIB else 8
        return squares(model(batch[0][:part]), batch[1][:part])

    def loss(model: nn.Module, batch: Any) -> torch.Tensor:
        return careful(model, batch)

    step = step_of(optimizer=None)
    step = Step(step.model, step.batch, compute_loss=loss)
    run(step, machine=machine_of("24GiB"))
    assert run(step, machine=machine_of("4GiB")).tape.equals(traced(step, Knobs(), machine_of("4GiB")).tape)


class _OnSideStream(nn.Module):
    """A linear layer that runs on a stream of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(256, 256)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.cuda.stream(torch.cuda.Stream()):
            return self.inner(x)


def test_a_step_with_streams_is_derived_with_its_streams():
    step = step_of(nn.Sequential(nn.Linear(256, 256), _OnSideStream()))
    run(step)
    derived = run(step, Knobs(batch=4)).tape
    assert derived.equals(traced(step, Knobs(batch=4), machine_of()).tape)
    assert set(derived.stream.tolist()) == {0, 1, 2}  # one more stream in each step


def test_a_step_whose_frees_may_end_late_is_traced():
    def loss(model: nn.Module, batch: Any) -> torch.Tensor:
        side = torch.cuda.Stream()
        with side:
            copied = batch[0] * 1
        copied.record_stream(torch.cuda.current_stream())
        return squares(model(copied), batch[1])

    step = Step(network(), step_of().batch, compute_loss=loss)
    run(step)
    again = run(step, Knobs(batch=4)).tape
    assert again.equals(traced(step, Knobs(batch=4), machine_of()).tape)
    assert again.meta.late_reserved is not None


def test_unknown_gpu_is_a_value_error():
    with pytest.raises(ValueError, match="no GPU"):
        run(step_of(), machine=machine_of("T5000"))


def test_the_operating_system_changes_addresses_only_and_needs_no_new_trace():
    step = Step(nn.Linear(1024, 1024), torch.zeros(4, 1024), loss=torch.mean, optimizer=torch.optim.SGD)
    linux, wsl = (run(step, machine=machine_of("T4", os=system)).tape for system in ("linux", "wsl"))
    assert (linux.meta.os, wsl.meta.os) == ("linux", "wsl")
    assert linux.size.tolist() == wsl.size.tolist()
    assert wsl.equals(traced(step, Knobs(), machine_of("T4", os="wsl")).tape)
    assert not np.array_equal(linux.address, wsl.address)
