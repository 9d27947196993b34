"""Sweeps and searches on a cluster of Dask."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import Executor

import pytest
import torch
from torch import nn

from memexplore.run.knobs.knobs import Knobs
from memexplore.run.programs.step import Step
from memexplore.run.search.advise import advise
from memexplore.run.search.sweep import sweep
from tests.search.sweep_steps import same

dask, distributed = pytest.importorskip("dask"), pytest.importorskip("distributed")
# Dask's profiler looks at the frames of running tasks, and a tensor lives on with a frame that it holds.
NOT_PROFILED = {"distributed.worker.profile.enabled": False}


@pytest.fixture(scope="module")
def executor() -> Iterator[Executor]:
    with (
        dask.config.set(NOT_PROFILED),
        distributed.LocalCluster(n_workers=2, threads_per_worker=2, processes=True, dashboard_address=":0") as cluster,
        distributed.Client(cluster) as client,
    ):
        yield client.get_executor()


def step() -> Step:
    """A step with a model of a local class and a lambda."""

    class Local(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(1024, 1024)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.inner(x).relu()

    return Step(Local(), torch.zeros(8, 1024), loss=lambda output: output.mean(), optimizer=torch.optim.Adam)


def test_a_sweep_on_a_cluster_has_the_tapes_of_one_here(executor: Executor) -> None:
    settings = [*(Knobs(batch=size) for size in range(2, 7)), Knobs(batch=3, accumulation=2)]
    there, here = (sweep(step(), settings, gpu="T4", executor=given, progress=None) for given in (executor, None))
    assert list(there) == settings[:-1]
    assert all(same(there[knobs], here[knobs]) for knobs in there)
    assert there.outcomes == here.outcomes
    assert "does not divide" in str(there.errors[settings[-1]])


def test_advice_from_a_cluster_is_that_of_a_search_here(executor: Executor) -> None:
    there, here = (advise(step(), "24MiB", budget=6, executor=given, progress=None) for given in (executor, None))
    assert [option.knobs for option in there.options] == [option.knobs for option in here.options]
