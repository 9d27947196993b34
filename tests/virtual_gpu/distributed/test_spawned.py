"""`torch.multiprocessing.spawn` on a virtual GPU: one of the processes, in the same process."""

from __future__ import annotations

import torch
import torch.distributed as dist
import torch.multiprocessing as multiprocessing
from torch.nn.parallel import DistributedDataParallel

import memexplore as mx

MIB = 2**20


def _train(rank: int, world: int) -> None:
    dist.init_process_group("nccl", rank=rank, world_size=world)
    torch.cuda.set_device(rank)
    model = DistributedDataParallel(torch.nn.Linear(1024, 1024, bias=False).to(rank), device_ids=[rank])
    model(torch.ones(2, 1024, device=rank)).sum().backward()
    dist.destroy_process_group()


def test_the_first_process_runs_on_the_virtual_gpu():
    tape = mx.simulate(lambda: multiprocessing.spawn(_train, args=(8,), nprocs=8), gpu="H100", release="2.13")
    # Parameter, bucket and gradient, and a cuBLAS workspace for each of two threads
    assert 3 * 4 * MIB + 2 * 32 * MIB <= tape.peak()[0] < 3 * 4 * MIB + 2 * 32 * MIB + MIB
    assert any("of 8 processes the first one ran" in note for note in tape.meta.notes)


def test_the_process_of_the_rank_runs():
    ran = []
    tape = mx.simulate(
        lambda: multiprocessing.spawn(lambda *arguments: ran.append(arguments), args=("a",), nprocs=8),
        gpu="H100",
        world=16,
        rank=11,
    )
    assert ran == [(3, "a")]
    assert any("of 8 processes number 3 ran" in note for note in tape.meta.notes)


def test_fewer_processes_than_ranks_run_the_first_one():
    ran = []
    mx.simulate(lambda: multiprocessing.spawn(ran.append, nprocs=2), gpu="H100", world=8, rank=5)
    assert ran == [0]


def test_the_processes_of_an_unfinished_spawn_have_ended():
    ran = []
    with mx.virtual("T4"):
        context = multiprocessing.spawn(lambda rank: ran.append(rank), nprocs=2, join=False)
        assert context.join() is True
    assert ran == [0]
