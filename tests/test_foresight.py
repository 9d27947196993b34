import dataclasses

import pytest
import torch
from torch import nn

from memexplore import devices
from memexplore.whatif import Knobs, Step, run
from memexplore.whatif.searching.foresight import likely_batch
from memexplore.whatif.searching.measured import measure

ENDLESS = dataclasses.replace(devices.find("T4"), total=1 << 50)


def step() -> Step:
    layers = (nn.Sequential(nn.Linear(256, 1024), nn.ReLU(), nn.Linear(1024, 256)) for _ in range(3))
    return Step(nn.Sequential(*layers), torch.zeros(512, 256), loss=torch.mean)


def tapes(*settings: Knobs):
    return {knobs.batch: run(step(), knobs, gpu=ENDLESS).tape for knobs in settings}


@pytest.mark.parametrize("size", ["300MiB", "731MiB", "4GiB"])
def test_where_memory_grows_evenly_the_guess_is_the_largest_batch(size):
    found = likely_batch(tapes(Knobs(batch=4096), Knobs(batch=8192)), devices.find(size).capacity)
    # Requests of a linear layer are the batch times its width: nothing is rounded on the way.
    assert [measure(step(), Knobs(batch=found + more), gpu=size)[1].fits for more in (0, 1)] == [True, False]


def test_the_guess_is_a_multiple_of_the_micro_batches():
    cut = [Knobs(batch=size, accumulation=3) for size in (6000, 12000)]
    assert likely_batch(tapes(*cut), devices.find("300MiB").capacity, unit=3) % 3 == 0


def test_runs_that_do_not_make_the_same_requests_tell_nothing():
    one = run(step(), Knobs(batch=512), gpu=ENDLESS).tape
    other = run(step(), Knobs(batch=1024, checkpoint="every 1"), gpu=ENDLESS).tape
    assert likely_batch({512: one, 1024: other}, devices.find("100MiB").capacity) is None


def test_memory_that_does_not_grow_has_no_end():
    same = run(step(), Knobs(batch=512), gpu=ENDLESS).tape
    assert likely_batch({512: same, 1024: same}, devices.find("1GiB").capacity) is None


def test_a_gpu_too_small_for_any_batch_has_none():
    assert likely_batch(tapes(Knobs(batch=4096), Knobs(batch=8192)), devices.find("10MiB").capacity) == 0
