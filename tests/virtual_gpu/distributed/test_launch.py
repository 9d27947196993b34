"""A rank as `torchrun` starts it: its environment, its device, and what is there afterwards."""

from __future__ import annotations

import os
import socket
import subprocess
import sys

import pytest
import torch

import memexplore
from memexplore.virtual_gpu.distributed.ranks import Rank, variables

MIB = 2**20


def test_the_last_node_may_have_fewer_ranks():
    # 10 ranks: a node with 8, one with 2
    assert [variables(Rank(number, 10))["LOCAL_WORLD_SIZE"] for number in (7, 8, 9)] == ["8", "2", "2"]
    assert [variables(Rank(number, 10))["GROUP_RANK"] for number in (7, 8, 9)] == ["0", "1", "1"]


def test_a_rank_has_its_variables_and_its_gpu_and_the_environment_is_restored(monkeypatch):
    monkeypatch.setenv("RANK", "of the user")
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    names = variables(Rank(0, 1))
    before = {name: os.environ.get(name) for name in names}
    with memexplore.virtual("H100", world=4, rank=3):
        assert (os.environ["RANK"], os.environ["WORLD_SIZE"]) == ("3", "4")
        assert torch.distributed.is_torchelastic_launched()
        assert torch.cuda.device_count() == 4
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
        assert torch.zeros(1, device="cuda").device == torch.device("cuda", 3)
    assert {name: os.environ.get(name) for name in names} == before


def test_groups_have_the_size_of_the_world():
    with memexplore.virtual("H100", world=1024, rank=1000):
        torch.distributed.init_process_group("nccl")
        assert torch.distributed.get_rank() == 1000
        piece = torch.zeros(MIB // 4, device="cuda")
        pieces = [torch.empty_like(piece) for _ in range(torch.distributed.get_world_size())]
        torch.distributed.all_gather(pieces, piece)
        # 1 024 pieces of 1 MiB, and the piece of this rank
        assert torch.cuda.memory_allocated() == 1025 * MIB


@pytest.mark.parametrize(
    ("world", "rank", "reason"),
    [
        (8, 8, "rank 8 is not one of the 8 ranks"),
        (8, -1, "rank -1 is not one"),
        (0, 0, "world=0 is no number"),
        (None, 3, "write world=8 as well"),
    ],
)
def test_a_rank_that_the_group_does_not_have_is_refused(world, rank, reason):
    with pytest.raises(ValueError, match=reason):
        memexplore.virtual("H100", world=world, rank=rank)
    assert not torch.cuda.is_available()


def test_a_function_is_simulated_as_one_rank():
    seen = []

    def train() -> None:
        torch.distributed.init_process_group("nccl")
        seen.append((torch.distributed.get_rank(), os.environ["LOCAL_RANK"]))
        torch.ones(MIB, device="cuda")

    memexplore.simulate(train, gpu="H100", world=16, rank=9)
    # Rank 9 is the second one of the second node. A run out of memory runs again as the same rank.
    with pytest.raises(ValueError, match="rank=9 needs the number of processes"):
        memexplore.simulate(train, gpu="H100", rank=9)
    assert seen == [(9, "1")]


def test_a_process_that_the_program_starts_makes_its_own_store():
    code = "import torch.distributed as dist; dist.init_process_group('gloo', rank=0, world_size=1); print('made')"
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    environment = {**os.environ, **variables(Rank(0, 4)), "MASTER_PORT": port}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=200)
    assert done.stdout == "made\n"
