"""One rank of the virtual GPU beside the same rank of a real job of `torchrun`, request by request.

Real: every process of gloo on the CPU, recorded by `mx.record`. Predicted: that rank alone, on a virtual A100. Order
and size of every request and the place of every free must be the same. What only one side can have is taken out by name
and size:

- cuBLAS workspaces (category workspace): kernels of the CPU have none.
- The flat buffer that NCCL gathers a list of tensors into. Gloo's buffers are no tensors.
- Tensors that torch keeps on the host on any machine (`host_blocks`): only where the host is the recorded device are
  they on the tape.

A thread of gloo drops its reference to a tensor at any time after the collective: only blocks of the size of a tensor
in a collective may be freed later than predicted.
"""

from __future__ import annotations

import math
import operator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

import memexplore as mx
from memexplore.tape import Action, Category, Tape
from tests.ranks.test_torchrun import torchrun
from tests.virtual_gpu.distributed.gloo_programs import PROGRAMS, file_of

MODULE = "tests.virtual_gpu.distributed.gloo_programs"


class Block(NamedTuple):
    op: str
    size: int


def host_blocks(program: str, rank: int, world: int) -> list[Block]:
    """Blocks of the recorded rank that are on the host on a machine with GPUs."""
    found = []
    if program in ("ddp", "ddp_views", "zero1"):
        # verify_params_across_processes compares sizes and strides on the host: 3 weights of 4 and 2 biases of 2
        # numbers, int64.
        found.append(Block("aten::empty", (3 * 4 + 2 * 2) * 8))
        # Reducer::sync_bucket_indices at the second forward: the bucket of 5 parameters and the number of buckets,
        # int32; the size of each of the three buckets, of 10 280, 262 144 and 66 560 bytes.
        found += [Block("aten::empty", (5 + 1) * 4), Block("aten::empty", 3 * 4)]
    if program == "zero1":
        # Adam counts the steps of its parameters on the host. Parameters go to the rank with the fewest bytes.
        updated = {2: (1, 4), 4: (1, 1, 1, 2)}[world][rank]
        found += updated * [Block("aten::lift_fresh", 4)]
    if program.startswith("fsdp2") or program == "tp":
        # DeviceMesh looks for this rank: numbers of int32, bool, one index of int64.
        found += [Block("aten::arange", 4 * world), Block("aten::eq", world), Block("aten::nonzero", 8)]
    return found


def nccl_blocks(program: str, world: int) -> list[Block]:
    """Buffers that only ProcessGroupNCCL has: the number of parameters (int64) of each rank."""
    return [Block("aten::new_empty", 8 * world)] if program in ("ddp", "ddp_views", "zero1") else []


class Requests(NamedTuple):
    """Sizes of the requests of a tape in order, and for each the number of requests before its free."""

    sizes: list[int]
    freed_after: list[float]
    """Infinite for a block that is not freed."""


def requests(tape: Tape, left_out: list[Block]) -> Requests:
    """The requests of a tape without workspaces and the blocks left out."""
    found, absent, open_at = Requests([], []), list(left_out), {}
    for row in range(len(tape)):
        action, size, address = Action(int(tape.action[row])), int(tape.size[row]), int(tape.address[row])
        if action is Action.ALLOC and size:
            block = Block(tape.ops[tape.op[row]], size)
            if Category(int(tape.category[row])) is Category.WORKSPACE:
                continue
            if block in absent:
                absent.remove(block)
                continue
            open_at[address] = len(found.sizes)
            found.sizes.append(size)
            found.freed_after.append(math.inf)
        elif action is Action.FREE_REQUESTED and address in open_at:
            found.freed_after[open_at.pop(address)] = len(found.sizes)
    assert not absent
    return found


class Communicated(TorchDispatchMode):
    """Notes the bytes of the storages that collectives get and return."""

    NAMESPACES = ("c10d::", "_c10d_functional::", "_c10d_functional_autograd::", "fsdp::")

    def __init__(self) -> None:
        super().__init__()
        self.sizes: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(hasattr(kind, "__tensor_flatten__") for kind in types):
            return NotImplemented
        result = func(*args, **(kwargs or {}))
        if func.name().startswith(self.NAMESPACES):
            for value in pytree.tree_leaves((args, kwargs, result)):
                if isinstance(value, torch.Tensor):
                    self.sizes.add(value.untyped_storage().nbytes())
        return result


def predicted(name: str, rank: int, world: int) -> tuple[Requests, set[int]]:
    """The requests of a program on the virtual GPU, and the sizes of the storages in its collectives."""
    communicated = Communicated()
    with mx.virtual("A100", world=world, rank=rank):
        dist.init_process_group("gloo")
        with mx.record() as recording, communicated:
            PROGRAMS[name]("cuda")
    return requests(recording.tape, nccl_blocks(name, world)), communicated.sizes


def recorded(world: int, folder: Path) -> dict[tuple[str, int], Requests]:
    """The requests of each program on each real rank."""
    done = torchrun(world, "-m", MODULE, folder, folder=folder)
    assert done.returncode == 0, done.stderr
    return {
        (name, rank): requests(mx.load(file_of(folder, name, rank))[0], host_blocks(name, rank, world))
        for name in PROGRAMS
        for rank in range(world)
    }


@pytest.mark.parametrize("world", [2, 4])
def test_each_rank_makes_the_requests_of_a_real_rank(world, tmp_path):
    measured = recorded(world, tmp_path)
    for (name, rank), real in measured.items():
        virtual, communicated = predicted(name, rank, world)
        assert real.sizes == virtual.sizes, (name, rank)
        # A thread of gloo lets go of a tensor at any time after its collective, never before.
        differing = {
            size
            for size, ends, expected in zip(real.sizes, real.freed_after, virtual.freed_after, strict=True)
            if ends != expected
        }
        assert differing <= communicated, (name, rank)
        assert all(map(operator.ge, real.freed_after, virtual.freed_after)), (name, rank)
