import dataclasses

import pytest
import torch
from torch import nn

from memexplore import gpu_catalogue
from memexplore.knobs.knobs import Knobs
from memexplore.search.batch_extrapolation import likely_batch
from memexplore.steps.outcome import run_outcome
from memexplore.steps.step import Step
from memexplore.steps.trial import run

ENDLESS = dataclasses.replace(gpu_catalogue.find("T4"), total=1 << 50)


def step() -> Step:
    layers = (nn.Sequential(nn.Linear(256, 1024), nn.ReLU(), nn.Linear(1024, 256)) for _ in range(3))
    return Step(nn.Sequential(*layers), torch.zeros(512, 256), loss=torch.mean)


def tapes(*settings: Knobs):
    return {knobs.batch: run(step(), knobs, gpu=ENDLESS).tape for knobs in settings}


@pytest.mark.parametrize("size", ["300MiB", "731MiB", "4GiB"])
def test_where_memory_grows_evenly_the_guess_is_the_largest_batch(size):
    found = likely_batch(tapes(Knobs(batch=4096), Knobs(batch=8192)), gpu_catalogue.find(size).capacity)
    # Requests of a linear layer are the batch times its width: nothing is rounded on the way.
    assert [run_outcome(step(), Knobs(batch=found + more), gpu=size)[1].fits for more in (0, 1)] == [True, False]


def test_the_guess_is_a_multiple_of_the_micro_batches():
    cut = [Knobs(batch=size, accumulation=3) for size in (6000, 12000)]
    assert likely_batch(tapes(*cut), gpu_catalogue.find("300MiB").capacity, unit=3) % 3 == 0


def test_runs_that_do_not_make_the_same_requests_tell_nothing():
    one = run(step(), Knobs(batch=512), gpu=ENDLESS).tape
    other = run(step(), Knobs(batch=1024, checkpoint="every 1"), gpu=ENDLESS).tape
    assert likely_batch({512: one, 1024: other}, gpu_catalogue.find("100MiB").capacity) is None


def test_memory_that_does_not_grow_has_no_end():
    same = run(step(), Knobs(batch=512), gpu=ENDLESS).tape
    assert likely_batch({512: same, 1024: same}, gpu_catalogue.find("1GiB").capacity) is None


def test_a_gpu_too_small_for_any_batch_has_none():
    assert likely_batch(tapes(Knobs(batch=4096), Knobs(batch=8192)), gpu_catalogue.find("10MiB").capacity) == 0
