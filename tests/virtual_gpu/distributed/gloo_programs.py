"""Four ways of training on several processes, for any device, and a real rank of them on the CPU.

`python -m torch.distributed.run -m tests.virtual_gpu.distributed.gloo_programs FOLDER` records every program on every
rank, with gloo, and writes the tapes into the folder.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

import memexplore as mx

STEPS = 3


def model(device: str) -> nn.Sequential:
    """Weights of 65 536, 262 144 and 10 240 bytes, biases of 1 024 and 40; 10 rows are uneven shards of 4 ranks."""
    layers = nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 256, bias=False), nn.ReLU(), nn.Linear(256, 10)
    return nn.Sequential(*layers).to(device)


def train(wrapped: nn.Module, device: str, optimizer: torch.optim.Optimizer | None = None) -> None:
    # CUDA's default is the update of all tensors together, with temporaries; the CPU's is one by one.
    optimizer = optimizer or torch.optim.SGD(wrapped.parameters(), lr=0.1, momentum=0.9, foreach=False)
    for _ in range(STEPS):
        optimizer.zero_grad()
        wrapped(torch.ones(16, 64, device=device)).square().mean().backward()
        optimizer.step()


def ddp(device: str) -> None:
    train(DistributedDataParallel(model(device), bucket_cap_mb=0.005), device)


def ddp_views(device: str) -> None:
    train(DistributedDataParallel(model(device), bucket_cap_mb=0.005, gradient_as_bucket_view=True), device)


def zero1(device: str) -> None:
    wrapped = DistributedDataParallel(model(device), bucket_cap_mb=0.005)
    train(wrapped, device, ZeroRedundancyOptimizer(wrapped.parameters(), torch.optim.Adam, lr=0.1, foreach=False))


def fsdp2(device: str, **options: object) -> None:
    mesh = init_device_mesh(device, (dist.get_world_size(),))
    whole = model(device)
    for number in (0, 2, 4):
        fully_shard(whole[number], mesh=mesh, **options)
    train(fully_shard(whole, mesh=mesh, **options), device)


def fsdp2_kept(device: str) -> None:
    fsdp2(device, reshard_after_forward=False)


def fsdp2_bfloat16(device: str) -> None:
    fsdp2(device, mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32))


def tp(device: str) -> None:
    mesh = init_device_mesh(device, (dist.get_world_size(),))
    train(parallelize_module(model(device), mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()}), device)


PROGRAMS: dict[str, Callable[[str], None]] = {
    program.__name__: program for program in (ddp, ddp_views, zero1, fsdp2, fsdp2_kept, fsdp2_bfloat16, tp)
}


def file_of(folder: Path, program: str, rank: int) -> Path:
    return folder / f"{program}-{rank}.tape"


def main(folder: Path) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    for name, program in PROGRAMS.items():
        with mx.record() as recording:
            program("cpu")
        recording.tape.save(file_of(folder, name, dist.get_rank()))
    dist.barrier()  # a rank whose peers are still in a collective can be ended by gloo
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
