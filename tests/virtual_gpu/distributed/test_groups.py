"""Process groups of one rank: any backend and size, and nothing left when the virtual GPU is turned off."""

from __future__ import annotations

import multiprocessing
import os
import sys
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

import memexplore as mx
from memexplore.virtual_gpu import device
from tests.interrupts import interrupted
from tests.virtual_gpu.torch_state import functions, global_state


@pytest.fixture(autouse=True)
def environment(monkeypatch: pytest.MonkeyPatch) -> Iterator[pytest.MonkeyPatch]:
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    yield monkeypatch
    assert not dist.is_initialized()


def groups_state() -> dict[str, Any]:
    world = c10d._world
    return {
        "default": world.default_pg,
        "groups": [len(table) for table in (world.pg_map, world.pg_names, world.pg_group_ranks, world.pg_to_tag)],
        "tags": dict(world.tags_to_pg),
        "count": world.group_count,
        "hook": sys.excepthook,
        "rest": (c10d._backend, c10d._default_pg_init_method),
        "nccl": dist.is_nccl_available(),
    }


@pytest.mark.parametrize("backend", ["nccl", "gloo", "mpi", "cpu:gloo,cuda:nccl"])
@pytest.mark.parametrize("world", [1, 2, 8, 1024])
def test_a_group_of_any_backend_has_the_size_of_the_environment(environment, backend, world):
    environment.setenv("WORLD_SIZE", str(world))
    environment.setenv("RANK", str(world - 1))
    with mx.virtual("T4"):
        dist.init_process_group(backend)
        assert (dist.get_backend(), dist.get_rank(), dist.get_world_size()) == (backend, world - 1, world)
        dist.destroy_process_group()
        assert not dist.is_initialized()


def test_a_group_without_backend_and_environment_is_the_only_rank():
    with mx.virtual("T4"):
        dist.init_process_group()
        assert (dist.get_rank(), dist.get_world_size()) == (0, 1)


@pytest.mark.parametrize("method", ["tcp://127.0.0.1:23456", "file:///nowhere/file", None])
def test_arguments_give_rank_and_size_and_nothing_is_opened(method):
    with mx.virtual("T4"):
        dist.init_process_group("nccl", init_method=method, rank=3, world_size=8)
        assert (dist.get_rank(), dist.get_world_size()) == (3, 8)
    assert not os.path.exists("/nowhere")


def test_subgroups_are_of_the_ranks_given():
    with mx.virtual("T4"):
        dist.init_process_group("nccl", rank=5, world_size=8)
        odd = dist.new_group([1, 3, 5, 7])
        assert (dist.get_rank(odd), dist.get_world_size(odd)) == (2, 4)
        assert dist.new_group([0, 1]) == dist.GroupMember.NON_GROUP_MEMBER
        mesh = dist.init_device_mesh("cuda", (2, 4), mesh_dim_names=("replicate", "shard"))
        assert (mesh["shard"].size(), mesh.get_local_rank("shard"), mesh.get_local_rank("replicate")) == (4, 1, 1)


def test_a_device_mesh_makes_the_default_group(environment):
    environment.setenv("WORLD_SIZE", "8")
    with mx.virtual("T4"):
        assert dist.init_device_mesh("cuda", (8,)).size() == 8
        assert dist.get_world_size() == 8


def test_a_larger_group_is_noted_as_an_assumption():
    def train() -> None:
        torch.ones(1, device="cuda")
        dist.init_process_group("nccl", rank=1, world_size=2)

    notes = mx.simulate(train, gpu="T4").meta.notes
    assert any("every rank of a process group" in note and "rank 1 of 2" in note for note in notes)


def _with_groups() -> None:
    torch.ones(1, device="cuda")
    dist.init_process_group("nccl", rank=0, world_size=4)
    dist.new_group([0, 1])
    dist.init_device_mesh("cuda", (2, 2))


def test_nothing_is_left_of_groups_that_were_not_destroyed():
    mx.simulate(_with_groups)  # imports what torch imports lazily
    before, state, every_function = groups_state(), global_state(), functions()
    mx.simulate(_with_groups)
    assert (groups_state(), global_state(), functions()) == (before, state, every_function)


# Python drops an interrupt in the callback of a weak reference.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_nothing_is_left_after_an_interrupt_at_any_line_of_switching_off():
    mx.simulate(_with_groups)
    before, state, every_function = groups_state(), global_state(), functions()
    number = 0
    while True:
        block = mx.virtual("T4")
        block.__enter__()
        _with_groups()
        line = interrupted(lambda block=block: block.__exit__(None, None, None), number)
        assert (groups_state(), global_state()) == (before, state), line
        if line is None:
            break
        number += 1
    assert number > 100
    assert functions() == every_function


# Python drops an interrupt in the callback of a weak reference.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_nothing_is_left_after_an_interrupt_at_any_line_of_making_a_group():
    mx.simulate(_with_groups)
    before, state, every_function = groups_state(), global_state(), functions()
    for number in range(0, 2000, 7):
        with mx.virtual("T4"):
            line = interrupted(lambda: dist.init_process_group("nccl", rank=0, world_size=4), number)
        assert (groups_state(), global_state()) == (before, state), line
        if line is None:
            break
    device.turn_off()
    assert functions() == every_function


def _real_rank(rank: int, url: str, results: Any) -> None:
    """One of two real processes: a sum over both before, during and after a virtual GPU."""
    dist.init_process_group("gloo", init_method=url, rank=rank, world_size=2)
    sums = []

    def add() -> None:
        tensor = torch.tensor([rank + 1.0])
        dist.all_reduce(tensor)
        sums.append(tensor.item())

    add()
    with mx.virtual("T4"):
        add()
        virtual = torch.ones(1000, device="cuda")
        dist.all_reduce(virtual)  # nothing is sent
        half = dist.new_group([0, 1])
        tensor = torch.tensor([rank + 1.0])
        dist.all_reduce(tensor, group=half)
        sums.append(tensor.item())
    add()
    results.put((rank, sums, dist.get_backend(), dist.get_world_size()))
    dist.destroy_process_group()


def test_a_real_group_of_real_processes_keeps_working(tmp_path):
    context = multiprocessing.get_context("spawn")
    results = context.Queue()
    url = f"file://{tmp_path}/store"
    processes = [context.Process(target=_real_rank, args=(rank, url, results)) for rank in range(2)]
    for process in processes:
        process.start()
    found = sorted(results.get(timeout=200) for _ in processes)
    for process in processes:
        process.join(60)
    # 1 + 2, each of the four times
    assert found == [(rank, [3.0] * 4, "gloo", 2) for rank in range(2)]


def test_compiled_code_runs_after_a_group_was_made():
    torch.compile(torch.nn.Linear(2, 2), backend="eager")(torch.ones(1, 2))
    with mx.virtual("T4"):
        dist.init_process_group("nccl")
        model = torch.compile(torch.nn.Linear(2, 2).cuda())
        model(torch.ones(1, 2, device="cuda")).sum().backward()
    torch.compile(torch.nn.Linear(2, 2), backend="eager")(torch.ones(1, 2))


def test_a_monitored_barrier_of_gloo_waits_for_nobody():
    with mx.virtual("T4", world=8, rank=3):
        dist.init_process_group("nccl")
        dist.monitored_barrier(dist.new_group(backend="gloo"))
        with pytest.raises(ValueError, match="GLOO"):
            dist.monitored_barrier()
