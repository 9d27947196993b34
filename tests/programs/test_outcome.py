"""The numbers of a run: alone as with the tape, and the part that does not depend on the batch."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from memexplore.hardware import catalogue
from memexplore.run.knobs.knobs import Knobs
from memexplore.run.machine import machine_of
from memexplore.run.programs.step import Step
from memexplore.run.run import Want, run
from memexplore.tape import Action

MIB = 1024**2


def step(batch=64) -> Step:
    layers = (nn.Sequential(nn.Linear(256, 1024), nn.ReLU(), nn.Linear(1024, 256)) for _ in range(3))
    return Step(nn.Sequential(*layers), torch.zeros(batch, 256), loss=torch.mean)


def assert_same_numbers(knobs: Knobs, gpu: str) -> None:
    machine = machine_of(gpu)
    assert run(step(), knobs, machine, Want.NUMBERS).outcome == run(step(), knobs, machine).outcome


def test_numbers_are_those_of_a_run_on_the_gpu():
    for gpu in ("30MiB", "60MiB", "T4"):
        for knobs in (
            Knobs(),
            Knobs(batch=4096),
            Knobs(accumulation=4),
            Knobs(checkpoint="every 1"),
            Knobs(gpu="64MiB"),
        ):
            assert_same_numbers(knobs, gpu)


@pytest.mark.parametrize(
    "settings", ["expandable_segments:True", "per_process_memory_fraction:0.5", "max_split_size_mb:21"]
)
def test_numbers_under_allocator_settings_are_those_of_a_run_on_the_gpu(settings):
    for gpu in ("30MiB", "40MiB", "60MiB", "110MiB", "120MiB"):
        assert_same_numbers(Knobs(settings=settings), gpu)


def test_tape_of_the_numbers_never_ends_out_of_memory():
    result = run(step(), machine=machine_of("30MiB"), want=Want.NUMBERS)
    assert not result.fits
    assert Action.OOM not in result.tape.action


def test_a_step_that_reads_the_memory_is_run_on_the_gpu():
    totals = set()

    def loss(output):
        totals.add(torch.cuda.get_device_properties(0).total_memory)
        return output.mean()

    reading = Step(nn.Linear(256, 256), torch.zeros(4, 256), loss=loss)
    outcome = run(reading, machine=machine_of("T4"), want=Want.NUMBERS).outcome
    assert catalogue.find("T4").total in totals
    assert outcome == run(reading, machine=machine_of("T4")).outcome


# cuBLAS takes a workspace of 8.125 MiB in forward and one in the thread of backward; from torch 2.15 a call frees it.
@pytest.mark.parametrize(("release", "workspaces"), [("2.13", 2 * 8.125 * MIB), ("2.15", 0)])
def test_the_constant_is_weights_gradients_and_states(release, workspaces):
    linear = Step(nn.Linear(1024, 1024, bias=False), torch.zeros(4, 1024), loss=torch.mean)
    constant = run(linear, machine=machine_of(release=release)).outcome.constant
    # 4 * 4 MiB: the weight, its gradient and AdamW's two states; the batch of 4 * 1024 * 4 bytes; a block for the loss
    assert constant == 16 * MIB + 16 * 1024 + 512 + workspaces
