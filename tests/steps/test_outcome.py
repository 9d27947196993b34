"""Outcomes: with unlimited memory as on the GPU itself, and the part that does not depend on the batch."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn

from memexplore import gpu_catalogue
from memexplore.knobs.knobs import Knobs
from memexplore.steps.outcome import is_unfinished, run_drawn, run_outcome, run_unlimited
from memexplore.steps.step import Step
from memexplore.tape import COLUMNS, Action, Phase

MIB = 1024**2


def step(batch=64) -> Step:
    layers = (nn.Sequential(nn.Linear(256, 1024), nn.ReLU(), nn.Linear(1024, 256)) for _ in range(3))
    return Step(nn.Sequential(*layers), torch.zeros(batch, 256), loss=torch.mean)


def test_unlimited_outcome_is_that_of_a_run_on_the_gpu():
    settings = [Knobs(), Knobs(batch=4096), Knobs(accumulation=4), Knobs(checkpoint="every 1"), Knobs(gpu="64MiB")]
    for gpu in ("30MiB", "60MiB", "T4"):
        for knobs in settings:
            assert run_unlimited(step(), knobs, gpu=gpu)[1] == run_outcome(step(), knobs, gpu=gpu)[1]


@pytest.mark.parametrize(
    "settings", ["expandable_segments:True", "per_process_memory_fraction:0.5", "max_split_size_mb:21"]
)
def test_unlimited_outcome_under_allocator_settings_is_that_of_a_run_on_the_gpu(settings):
    for gpu in ("30MiB", "40MiB", "60MiB", "110MiB", "120MiB"):
        knobs = Knobs(settings=settings)
        assert run_unlimited(step(), knobs, gpu=gpu)[1] == run_outcome(step(), knobs, gpu=gpu)[1]


def test_tape_of_an_unlimited_run_never_ends_out_of_memory():
    trial, outcome = run_unlimited(step(), gpu="30MiB")
    assert not outcome.fits
    assert Action.OOM not in trial.tape.action


@pytest.mark.parametrize("gpu", ["30MiB", "60MiB", "100MiB", "8GiB"])
@pytest.mark.parametrize("knobs", [Knobs(batch=96), Knobs(batch=4096), Knobs(batch=2048, accumulation=4)])
def test_a_drawn_run_is_a_run_up_to_the_failed_request(knobs, gpu):
    drawn, plain = step(), step()
    for batch in (64, 32):
        run_drawn(drawn, knobs.replace(batch=batch), gpu="8GiB")  # traces that the next run continues
    trial, outcome = run_drawn(drawn, knobs, gpu=gpu)
    expected, expected_outcome = run_outcome(plain, knobs, gpu=gpu)
    assert outcome == expected_outcome
    end = len(trial.tape)
    assert outcome.fits == (Action.OOM not in expected.tape.action)
    assert is_unfinished(trial) or end == len(expected.tape)
    # Which blocks are state of the optimizer shows when the update has ended.
    settled = trial.tape.phase != Phase.OPTIMIZER
    assert np.array_equal(trial.tape.category[settled], expected.tape.category[:end][settled])
    for name in set(COLUMNS) - {"time", "category", "op", "module", "stack", "tensor"}:
        assert np.array_equal(getattr(trial.tape, name), getattr(expected.tape, name)[:end]), name
    for name, texts in (("op", "ops"), ("module", "modules"), ("stack", "stacks"), ("tensor", "tensor_texts")):
        assert texts_of(trial.tape, name, texts) == texts_of(expected.tape[:end], name, texts), name
    assert (trial.tape.whole is None) == outcome.fits
    assert trial.tape.whole is None or trial.tape.whole.equals(expected.tape.whole)


def test_a_drawn_run_that_does_not_fit_is_unfinished():
    drawn = step()
    run_drawn(drawn, gpu="8GiB", release="2.13")
    # 3 * 2 MiB of weights, 4 MiB of input, then a workspace of 8.125 MiB and activations of 16 MiB each.
    assert is_unfinished(run_drawn(drawn, Knobs(batch=4096), gpu="60MiB", release="2.13")[0])


def texts_of(tape, numbers, texts):
    return [getattr(tape, texts)[number] if number >= 0 else None for number in getattr(tape, numbers).tolist()]


def test_a_drawn_run_goes_on_without_a_workspace_that_does_not_fit():
    def images():
        layers = (nn.Conv2d(64, 64, 3, padding=1) for _ in range(3))
        return Step(nn.Sequential(*layers), torch.zeros(2, 64, 64, 64), loss=torch.mean)

    drawn, refused = images(), 0
    run_drawn(drawn, gpu="8GiB")
    run_drawn(drawn, Knobs(batch=3), gpu="8GiB")
    for mebibytes in range(40, 120, 4):
        trial, outcome = run_drawn(drawn, Knobs(batch=8), gpu=f"{mebibytes}MiB")
        expected, expected_outcome = run_outcome(images(), Knobs(batch=8), gpu=f"{mebibytes}MiB")
        assert outcome == expected_outcome, mebibytes
        refused += not outcome.fits
        assert is_unfinished(trial) or trial.tape.equals(expected.tape)
    assert 0 < refused < 20


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
