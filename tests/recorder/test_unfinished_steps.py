"""Optimizer state that was made in a step that an exception ended."""

from __future__ import annotations

import contextlib
from collections.abc import Callable

import pytest
import torch
from torch import nn

import memexplore as mx
from memexplore.analysis.curves import category_bytes
from memexplore.analysis.verdict import failed_request
from memexplore.recorder.recording import record
from memexplore.run.machine import virtual
from memexplore.tape import Category, Tape

MIB = 1 << 20


def _update(foreach: bool) -> Callable[[], None]:
    """A first update: 40 MiB of weights, as many gradients, and then room for the states of one layer and a half."""
    model = nn.Sequential(*(nn.Linear(1024, 2560, bias=False) for _ in range(4)))

    def run() -> None:
        model.cuda()
        optimizer = torch.optim.Adam(model.parameters(), foreach=foreach)
        for weight in model.parameters():
            weight.grad = torch.zeros_like(weight)
        optimizer.step()

    return run


def _states(tape: Tape, row: int) -> int:
    return int(category_bytes(tape, row)[Category.OPTIMIZER_STATE])


@pytest.mark.parametrize("foreach", [False, True])
def test_the_states_of_an_update_that_runs_out_of_memory_are_optimizer_state(foreach):
    tape = mx.simulate(_update(foreach), gpu="104MiB")
    row = failed_request(tape)
    # 104 - 2 x 40 leaves 24: two states of 10 MiB, and the third does not fit.
    assert (_states(tape, row), int(tape.size[row])) == (20 * MIB, 10 * MIB)


@pytest.mark.parametrize("device", ["cuda", "cpu"])
def test_the_states_of_an_update_that_is_interrupted_are_optimizer_state(device):
    model = nn.Linear(1024, 1024, bias=False)
    with virtual("T4") if device == "cuda" else contextlib.nullcontext():
        model.to(device)
        optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
        model.weight.grad = torch.zeros_like(model.weight)
        optimizer.register_step_post_hook(_interrupt)
        with pytest.raises(KeyboardInterrupt), record() as recording:
            optimizer.step()
    assert _states(recording.tape, len(recording.tape) - 1) == 4 * MIB


def test_the_states_of_another_program_are_not_part_of_a_recording_that_fails():
    weight = nn.Parameter(torch.zeros(1000))
    other = torch.optim.SGD([weight], 0.1, momentum=0.9)
    weight.grad = torch.zeros_like(weight)
    other.step()
    with pytest.raises(KeyboardInterrupt), record() as recording:
        torch.zeros(10)
        _interrupt()
    assert recording.tape.size.max() == 40  # the ten zeros


def test_the_states_are_known_where_the_program_catches_the_error_and_goes_on():
    model = nn.Sequential(*(nn.Linear(1024, 2560, bias=False) for _ in range(4)))
    optimizer = torch.optim.Adam(model.parameters(), foreach=False)

    def run() -> None:
        model.cuda()
        for weight in model.parameters():
            weight.grad = torch.zeros_like(weight)
        with contextlib.suppress(torch.OutOfMemoryError):
            optimizer.step()
        torch.zeros(1, device="cuda")

    tape = mx.simulate(run, gpu="104MiB")
    assert _states(tape, len(tape) - 1) == 20 * MIB


def _interrupt(*_: object) -> None:
    raise KeyboardInterrupt
