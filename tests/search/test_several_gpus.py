"""Advice for a step whose weights, gradients and states are too large for one GPU."""

from __future__ import annotations

import functools
from collections.abc import Iterable

import pytest
import torch
from torch import nn

from memexplore.run.knobs.knobs import Knobs
from memexplore.run.machine import machine_of
from memexplore.run.programs.step import Step
from memexplore.run.run import Want
from memexplore.run.search.advice import Advice
from memexplore.run.search.advise import StepSearch, advise
from memexplore.run.search.runners import OneByOne
from memexplore.run.search.searching import run_all
from memexplore.run.search.setting_text import setting_text

PRICES = {"A10G": 1.5, "2xT4": 1.6, "4xT4": 2.0, "L40S": 3.0}


@functools.cache
def large() -> Advice:
    """Six weights of 1 GiB are 24 GiB with gradients and states: a T4 has 14.6, an A10G 22.5, two T4 29.

    FSDP2 holds 12 GiB of them on each of two GPUs, and two gathered layers and a gradient of 1 GiB each: too much.
    On four it holds 6 GiB.
    """
    layers = Step(
        lambda: nn.Sequential(*(nn.Linear(1 << 14, 1 << 14, bias=False) for _ in range(6))),
        torch.zeros(2, 1 << 14),
        loss=torch.mean,
        optimizer=torch.optim.AdamW,
    )
    return advise(layers, "T4", budget=1, progress=None, prices=PRICES)


def test_the_fewest_gpus_that_fit_are_an_option():
    assert Knobs(gpus=4, strategy="fsdp2") in [option.knobs for option in large().options]
    assert Knobs(gpus=2, strategy="fsdp2") not in [option.knobs for option in large().options]


def test_the_cheapest_set_to_rent_is_named_with_its_price():
    assert large().rented.knobs == Knobs(gpus=4, strategy="fsdp2")
    assert "The cheapest set to rent on which it fits: 4 × T4 for $2.00 an hour (prices as given)." in str(large())


def test_checkpointing_that_is_not_enough_for_one_gpu_may_be_enough_for_two():
    """12 weights of 8 500 × 8 500 are 13.9 GB with gradients and states, each of 204 activations is 0.2 GB.

    With every block checkpointed, one GPU holds 13.9 + 12 × 0.2 + 17 × 0.2 GB, a T4 has 15.6, each of two 7 GB less.
    """
    blocks = Step(
        lambda: nn.Sequential(*(nn.Sequential(nn.Linear(8500, 8500), *(nn.GELU(),) * 16) for _ in range(12))),
        torch.zeros(6000, 8500),
        loss=torch.mean,
        optimizer=torch.optim.AdamW,
    )
    rented = advise(blocks, "T4", budget=1, progress=None, prices={"2xT4": 1.0}).rented
    assert rented is not None
    assert rented.knobs == Knobs(checkpoint="every 1", gpus=2, strategy="fsdp2")


def test_settings_of_other_gpus_are_not_among_those_tried():
    assert [outcome.knobs for outcome in large().tried if outcome.knobs.gpus or outcome.knobs.gpu] == []


def test_a_step_that_fits_needs_no_other_gpus():
    small = advise(Step(nn.Linear(8, 8), torch.zeros(2, 8), loss=torch.mean), "T4", budget=1, progress=None)
    assert small.rented is None
    assert [option.knobs for option in small.options] == [Knobs()]


def test_several_gpus_as_text():
    assert setting_text(Knobs(gpu="A10G", gpus=4, strategy="fsdp2")) == "4 GPUs, A10G, with strategy fsdp2"


@pytest.mark.parametrize(("prices", "reason"), [({"8xT4": 0}, "dollars an hour"), ({"Z9": 1.0}, "Z9")])
def test_prices_that_are_none_are_refused(prices, reason):
    with pytest.raises(ValueError, match=reason):
        advise(Step(nn.Linear(8, 8), torch.zeros(2, 8), loss=torch.mean), "T4", prices=prices)


def test_a_gpu_with_the_kernels_of_one_on_which_the_step_needs_more_is_not_run():
    """The step needs more than 24 GiB on an L40S: an L4, which runs the same kernels, has 22 GiB."""
    ran: list[str | None] = []

    class Noting(OneByOne):
        def submit(self, settings: Iterable[Knobs]) -> None:
            super().submit(settings)
            ran.extend(knobs.gpu for knobs in settings)

    blocks = (nn.Sequential(nn.Linear(256, 1024), nn.ReLU(), nn.Linear(1024, 256)) for _ in range(6))
    wide = Step(nn.Sequential(*blocks), torch.zeros(1 << 20, 256), loss=torch.mean)
    prices = {"L4": 1.0, "A100 80GB": 4.0}
    search = StepSearch(wide, machine_of("24GiB"), budget=1, prices=prices)
    for _ in run_all(search, Noting(wide, search.machine, Want.NUMBERS)):
        pass
    advice = search.advice()
    assert advice is not None
    assert advice.rented is not None
    assert advice.rented.set.gpu == "A100 80GB"
    assert "L40S" in ran
    assert "L4" not in ran
