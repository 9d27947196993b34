"""Outcomes: with unlimited memory as on the GPU itself, and the part that does not depend on the batch."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from memexplore import gpu_catalogue
from memexplore.knobs.knobs import Knobs
from memexplore.steps.outcome import run_outcome, run_unlimited
from memexplore.steps.step import Step
from memexplore.tape import Action

MIB = 1024**2


def step(batch=64) -> Step:
    layers = (nn.Sequential(nn.Linear(256, 1024), nn.ReLU(), nn.Linear(1024, 256)) for _ in range(3))
    return Step(nn.Sequential(*layers), torch.zeros(batch, 256), loss=torch.mean)


def test_unlimited_outcome_is_that_of_a_run_on_the_gpu():
    settings = [Knobs(), Knobs(batch=4096), Knobs(accumulation=4), Knobs(checkpoint="every 1"), Knobs(gpu="64MiB")]
    for gpu in ("30MiB", "60MiB", "T4"):
        for knobs in settings:
            assert run_unlimited(step(), knobs, gpu=gpu)[1] == run_outcome(step(), knobs, gpu=gpu)[1]


def test_tape_of_an_unlimited_run_never_ends_out_of_memory():
    trial, outcome = run_unlimited(step(), gpu="30MiB")
    assert not outcome.fits
    assert Action.OOM not in trial.tape.action


def test_a_step_that_reads_the_memory_is_run_on_the_gpu():
    totals = set()

    def loss(output):
        totals.add(torch.cuda.get_device_properties(0).total_memory)
        return output.mean()

    reading = Step(nn.Linear(256, 256), torch.zeros(4, 256), loss=loss)
    outcome = run_unlimited(reading, gpu="T4")[1]
    assert gpu_catalogue.find("T4").total in totals
    assert outcome == run_outcome(reading, gpu="T4")[1]


# cuBLAS takes a workspace of 8.125 MiB in forward and one in the thread of backward; from torch 2.15 a call frees it.
@pytest.mark.parametrize(("release", "workspaces"), [("2.13", 2 * 8.125 * MIB), ("2.15", 0)])
def test_the_constant_is_weights_gradients_and_states(release, workspaces):
    linear = Step(nn.Linear(1024, 1024, bias=False), torch.zeros(4, 1024), loss=torch.mean)
    constant = run_outcome(linear, release=release)[1].constant
    # 4 * 4 MiB: the weight, its gradient and AdamW's two states; the batch of 4 * 1024 * 4 bytes; a block for the loss
    assert constant == 16 * MIB + 16 * 1024 + 512 + workspaces
