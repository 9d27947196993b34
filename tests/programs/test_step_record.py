"""What runs have learned about a step is kept beside the step, for as long as the step lives."""

from __future__ import annotations

import gc
import pickle
import weakref

import torch
from torch import nn

from memexplore.run.knobs.knobs import Knobs
from memexplore.run.machine import machine_of
from memexplore.run.programs import step_record
from memexplore.run.programs.step import Step
from memexplore.run.programs.step_record import built_model, record_of
from memexplore.run.programs.step_run import is_traced
from memexplore.run.run import run


def step() -> Step:
    return Step(nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 2)), torch.zeros(4, 8), loss=torch.mean)


def test_a_run_leaves_nothing_on_the_step() -> None:
    fresh = step()
    before = dict(vars(fresh))
    run(fresh, Knobs(inplace="on"), machine_of("T4"))
    assert vars(fresh) == before


def test_a_step_that_has_run_is_pickled_without_its_record() -> None:
    fresh = step()
    run(fresh, machine=machine_of("T4"))
    again = pickle.loads(pickle.dumps(fresh))
    assert is_traced(fresh, Knobs(), machine_of("T4"))
    assert not is_traced(again, Knobs(), machine_of("T4"))


def test_the_record_is_dropped_with_the_step() -> None:
    fresh = step()
    run(fresh, machine=machine_of("T4"))
    record, count = weakref.ref(record_of(fresh)), len(step_record._records)
    del fresh
    gc.collect()
    assert record() is None
    assert len(step_record._records) < count


def test_a_model_is_built_once_for_each_step() -> None:
    built = []
    lazy = Step(lambda: built.append(nn.Linear(4, 4)) or built[-1], torch.zeros(2, 4), loss=torch.mean)
    assert built_model(lazy) is built_model(lazy)
    assert len(built) == 1
