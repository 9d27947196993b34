"""Extrapolated batches of a net whose memory grows linearly, compared with runs."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from torch import nn

from memexplore.hardware import catalogue
from memexplore.run.knobs.knobs import Knobs
from memexplore.run.machine import machine_of, unlimited
from memexplore.run.programs.step import Step
from memexplore.run.run import run
from memexplore.run.search.batch_extrapolation import extrapolated_batch, proportional_batch
from memexplore.text.units import parse_size

T4 = catalogue.find("T4")
UNLIMITED = unlimited(T4)


def step() -> Step:
    layers = (nn.Sequential(nn.Linear(256, 1024), nn.ReLU(), nn.Linear(1024, 256)) for _ in range(3))
    return Step(nn.Sequential(*layers), torch.zeros(512, 256), loss=torch.mean)


def tapes(*settings: Knobs, release: str = "2.13"):
    return {knobs.batch: run(step(), knobs, machine_of(UNLIMITED, release=release)).tape for knobs in settings}


# cuBLAS workspaces are kept until torch 2.14, and freed after each call from 2.15.
@pytest.mark.parametrize("release", ["2.13", "2.15"])
@pytest.mark.parametrize("size", ["300MiB", "731MiB", "4GiB"])
def test_the_extrapolation_of_linear_growth_is_the_largest_batch(size, release):
    small = dataclasses.replace(T4, key=size, total=parse_size(size), outside=0)
    batch = extrapolated_batch(tapes(Knobs(batch=4096), Knobs(batch=8192), release=release), small.capacity)
    # Requests of a linear layer are the batch times its width: no request is rounded.
    results = [run(step(), Knobs(batch=batch + more), machine_of(small, release=release)) for more in (0, 1)]
    assert [result.fits for result in results] == [True, False]


def test_the_extrapolation_is_a_multiple_of_the_micro_batches():
    settings = [Knobs(batch=size, accumulation=3) for size in (6000, 12000)]
    assert extrapolated_batch(tapes(*settings), catalogue.find("300MiB").capacity, unit=3) % 3 == 0


def test_runs_with_different_requests_are_not_extrapolated():
    one = run(step(), Knobs(batch=512), machine_of(UNLIMITED)).tape
    other = run(step(), Knobs(batch=1024, checkpoint="every 1"), machine_of(UNLIMITED)).tape
    assert extrapolated_batch({512: one, 1024: other}, catalogue.find("100MiB").capacity) is None


def test_memory_that_does_not_grow_has_no_largest_batch():
    same = run(step(), Knobs(batch=512), machine_of(UNLIMITED)).tape
    assert extrapolated_batch({512: same, 1024: same}, catalogue.find("1GiB").capacity) is None


def test_the_extrapolation_is_0_on_a_gpu_too_small_for_any_batch():
    assert extrapolated_batch(tapes(Knobs(batch=4096), Knobs(batch=8192)), catalogue.find("10MiB").capacity) == 0


@pytest.mark.parametrize("size", ["300MiB", "731MiB"])
def test_one_run_gives_about_the_largest_batch(size):
    small = dataclasses.replace(T4, key=size, total=parse_size(size), outside=0)
    (tape,) = tapes(Knobs(batch=4096)).values()
    batch = proportional_batch(tape, 4096, small.capacity)
    # Sums over the batch take scratch memory that does not grow in proportion.
    results = [run(step(), Knobs(batch=int(batch * share)), machine_of(small, release="2.13")) for share in (1, 1.1)]
    assert [result.fits for result in results] == [True, False]


def test_one_run_that_takes_more_than_the_gpu_at_any_batch_gives_0():
    (tape,) = tapes(Knobs(batch=4096)).values()
    assert proportional_batch(tape, 4096, 10 << 20) == 0
