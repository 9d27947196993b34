"""Estimates of settings that were not run: the bytes of a run by what they depend on, and what no knob can save."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from memexplore.run.knobs.knobs import Knobs
from memexplore.run.machine import machine_of
from memexplore.run.programs.step import Step
from memexplore.run.run import Want, run
from memexplore.run.search.estimates import Need, SearchPoint, cannot_fit, combined, estimated, need_of

MIB = 1024**2


def step(optimizer=torch.optim.Adam) -> Step:
    """Four weights of 1024 x 1024: 16 MiB; activations of 256 x 1024: 1 MiB each."""
    layers = [layer for _ in range(4) for layer in (nn.Linear(1024, 1024, bias=False), nn.GELU())]
    return Step(nn.Sequential(*layers), torch.zeros(256, 1024), loss=torch.mean, optimizer=optimizer)


def need(knobs: Knobs | None = None) -> Need:
    return need_of(run(step(), knobs, machine_of("T4"), want=Want.NUMBERS).tape)


def test_weights_gradients_and_state_are_those_at_the_end_of_backward():
    found = need()
    # 4 weights of 4 MiB; Adam has two states, and a step of 512 bytes on the CPU
    assert (found.weights, found.gradients, found.states) == (16 * MIB, 16 * MIB, 32 * MIB)
    assert found.constant == 64 * MIB


def test_temporaries_of_the_update_are_bytes_that_activations_do_not_change():
    # The foreach update makes one temporary of the size of all weights.
    assert need().fixed - need().constant == 16 * MIB
    # The fused update has none, and its four step counts are on the GPU, in blocks of 512 bytes.
    assert need(Knobs(update="fused")).fixed == need().constant + 4 * 512


def test_an_update_in_backward_is_no_lower_bound():
    # Its temporaries stand beside activations, which a knob may save: 16 MiB of weights and 32 MiB of state are left.
    found = need(Knobs(update="in backward"))
    assert found.fixed == found.constant == 48 * MIB


def test_inference_has_activations_only():
    found = need(Knobs(mode="inference"))
    assert found.constant == found.fixed == 0
    assert found.activations == found.peak


ACTIVATIONS = [
    Knobs(checkpoint="every 1"),
    Knobs(checkpoint="norms"),
    Knobs(precision="fp16"),
    Knobs(accumulation=8),
    Knobs(offload="saved tensors on the CPU"),
    Knobs(inplace="on"),
    Knobs(input_size=256),
]


@pytest.mark.parametrize("knobs", ACTIVATIONS, ids=str)
def test_no_setting_of_activations_needs_less_than_the_fixed_bytes(knobs):
    given = step()
    if knobs.input_size:
        given = Step(nn.Sequential(nn.Linear(64, 64), nn.GELU()), torch.zeros(64, 512, 64), loss=torch.mean)
    fixed = need_of(run(given, machine=machine_of("T4"), want=Want.NUMBERS).tape).fixed
    assert run(given, knobs, machine_of("T4")).outcome.peak_allocated >= fixed


@pytest.mark.parametrize("update", ["fused", "per tensor"])
def test_no_setting_of_the_update_needs_less_than_forward_and_backward(update):
    assert run(step(), Knobs(update=update), machine_of("T4")).outcome.peak_allocated >= need().peak


def test_what_exceeds_the_capacity_whatever_a_knob_saves_cannot_fit():
    point = SearchPoint(1.0, 100, False, constant=40, gradients=10, fixed=60, peak=90, other=60)
    cannot = {knobs for knobs in ACTIVATIONS if cannot_fit(point, knobs, 59)}
    assert cannot == set(ACTIVATIONS)
    assert not any(cannot_fit(point, knobs, 60) for knobs in ACTIVATIONS)
    # Without fp32 weights, and with other weights or another optimizer, less is fixed.
    for knobs in (Knobs(precision="all bf16"), Knobs(lora="0"), Knobs(optimizer="SGD"), Knobs(update="in backward")):
        assert not cannot_fit(point, knobs, 1)


def test_estimate_of_a_combination_keeps_what_each_knob_leaves():
    written = SearchPoint(1.0, 100, False, constant=40, gradients=10, fixed=60, other=70)
    bf16 = written._replace(constant=20, gradients=5, fixed=30, other=35)
    cut = written._replace(other=35)
    # constant 20 - gradients 5 + activations 35 / 2 = 32; the overhead is 1, as 40 - 10 + 70 = 100 were needed
    assert combined(bf16._replace(needed=50), cut, written).needed == 20 - 5 + 35 // 2


def test_fewer_micro_batches_are_estimated_to_be_faster():
    found, written = need(), SearchPoint(1.0, 100, False)
    two, four = (estimated(Knobs(accumulation=count), found, written, None) for count in (2, 4))
    # All of the activations are divided; what is needed is also bounded by the update.
    assert (two.other, four.other) == (found.activations // 2, found.activations // 4)
    assert two.time < four.time


def test_what_a_knob_saves_of_gradients_is_at_most_what_another_knob_leaves():
    whole = Need(weights=30, gradients=30, states=60, activations=10, fixed=120, peak=100)
    written = SearchPoint(1.0, 130, False, 120, 30, 120, other=10, states=60)
    knobs = Knobs(update="in backward"), Knobs(lora="0")
    in_backward, lora = (estimated(one, whole, written, None) for one in knobs)
    # LoRA leaves the 30 bytes of the weights and no gradients, of which an update in backward saves none.
    assert combined(lora, in_backward, written).constant == 30
    assert combined(in_backward, lora, written).constant == 30
