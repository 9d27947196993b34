"""The smallest capacity of a step, tried on virtual GPUs that have it, and that have 2 MiB less."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

import pytest

from memexplore.analysis.need import need
from memexplore.run.knobs.applying.on_machine import on_machine
from memexplore.run.knobs.knobs import Knobs
from memexplore.run.machine import machine_of
from memexplore.run.programs.out_of_memory import fits
from memexplore.run.programs.step import Step
from memexplore.run.programs.step_run import traced
from memexplore.tape import Tape
from tests.families import FAMILIES

pytest.importorskip("transformers")

PAGE = 2 << 20
UNSIZED = {"graph", "recommender"}
"""Families whose samples do not lie along the first dimension: they run with the batch that they have."""


@functools.cache
def step_of(name: str) -> Step:
    family = FAMILIES[name]

    def loss(model: Any, batch: Any) -> Iterator[Any]:
        return family.losses(model, batch)

    return Step(lambda: family.build().train(), family.batch("cpu"), compute_loss=loss)


def ran(name: str, batch: int | None, capacity: str) -> Tape:
    knobs = Knobs(batch=batch)
    return traced(step_of(name), knobs, on_machine(knobs, machine_of(capacity))).tape


@pytest.mark.parametrize("batch", [2, 4, 16])
@pytest.mark.parametrize("name", sorted(FAMILIES))
def test_a_step_runs_with_the_smallest_capacity_and_not_with_two_mebibytes_less(name: str, batch: int) -> None:
    if name in UNSIZED and batch != 4:
        pytest.skip("the batch of this family has no size that can be changed here")
    size = None if name in UNSIZED else batch
    required = need(ran(name, size, "32GiB"))
    assert required is not None
    assert fits(ran(name, size, f"{required.smallest}B"))
    assert required.smallest == PAGE or not fits(ran(name, size, f"{required.smallest - PAGE}B"))
