"""The rank of a process, from arguments, URLs and the environment."""

from __future__ import annotations

import pytest

from memexplore.virtual_gpu.distributed.ranks import Rank, of_rendezvous

VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")


@pytest.fixture(autouse=True)
def environment(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)
    return monkeypatch


def test_without_arguments_and_environment_it_is_the_only_rank():
    assert of_rendezvous("env://") == Rank(0, 1)


def test_the_environment_gives_rank_and_size(environment):
    environment.setenv("RANK", "3")
    environment.setenv("WORLD_SIZE", "1024")
    assert of_rendezvous("env://") == Rank(3, 1024)


def test_arguments_come_before_the_url_and_the_url_before_the_environment(environment):
    environment.setenv("RANK", "3")
    environment.setenv("WORLD_SIZE", "4")
    assert of_rendezvous("tcp://host:29500?rank=5&world_size=8") == Rank(5, 8)
    assert of_rendezvous("tcp://host:29500?rank=5&world_size=8", rank=0, world=2) == Rank(0, 2)


def test_a_rank_outside_the_group_is_refused(environment):
    environment.setenv("RANK", "8")
    environment.setenv("WORLD_SIZE", "8")
    with pytest.raises(ValueError, match="rank 8 is not one of the 8 ranks of the group: set RANK to a number from 0"):
        of_rendezvous("env://")


def test_a_variable_that_is_no_number_is_refused(environment):
    environment.setenv("WORLD_SIZE", "two")
    with pytest.raises(ValueError, match="WORLD_SIZE is 'two': set it to a whole number"):
        of_rendezvous("env://")
