"""What FSDP2 and DDP request, block by block, from the numbers of rows, columns, ranks and bytes alone."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel

import memexplore as mx
from memexplore.tape import Action, Category, Phase, Tape

MIB = 2**20
WORLD = 8
COLUMNS = 1024
ROWS = (1024, 1001, 517)
"""Of three blocks, each a matrix: 128, 126 and 65 rows for a rank, the last two with padding."""
LEAST = 100_000
"""Bytes: outputs of the blocks, for 4 samples, are smaller, parts of parameters larger."""


def shard(rows: int, number: int) -> int:
    """Bytes of the padded part of a matrix that a rank has, with `number` bytes for a number."""
    return -(-rows // WORLD) * COLUMNS * number


def whole(rows: int, number: int) -> int:
    return rows * COLUMNS * number


def requests(tape: Tape, phase: Phase) -> Counter[int]:
    """How often each size was requested in a phase, without workspaces and what is smaller than a part."""
    chosen = (tape.action == Action.ALLOC) & (tape.phase == phase) & (tape.category != Category.WORKSPACE)
    return Counter(size for size in tape.size[chosen].tolist() if size >= LEAST)


def fsdp2(**options: Any) -> Tape:
    """One forward and backward pass of rank 0, whose parts have no rows missing."""
    with mx.virtual("H100", world=WORLD), mx.record() as recording:
        dist.init_process_group("nccl")
        with torch.device("meta"):
            blocks = [Block(rows) for rows in ROWS]
        model = nn.Sequential(*(fully_shard(block, **options) for block in blocks))
        fully_shard(model, **options)
        model.to_empty(device="cuda")
        model(torch.ones(4, COLUMNS, device="cuda", requires_grad=True)).square().mean().backward()
    return recording.tape


class Block(nn.Module):
    def __init__(self, rows: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(rows, COLUMNS))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + nn.functional.linear(x, self.weight).mean(-1, keepdim=True)


def gathered(number: int) -> Counter[int]:
    """For each block the gathered parts of all ranks, and the parameter with its padding, copied out of them."""
    return Counter(2 * [WORLD * shard(rows, number) for rows in ROWS])


def reduced(number: int, reduce: int) -> Counter[int]:
    """For each block its gradient, the gradients of all parts in order, and the sum of this rank's part."""
    return Counter(
        [whole(rows, number) for rows in ROWS]
        + [WORLD * shard(rows, reduce) for rows in ROWS]
        + [shard(rows, reduce) for rows in ROWS]
    )


def test_blocks_are_gathered_twice_and_their_gradients_summed():
    tape = fsdp2()
    assert requests(tape, Phase.FORWARD) == gathered(4)
    assert requests(tape, Phase.BACKWARD) == gathered(4) + reduced(4, 4)


def test_blocks_that_stay_gathered_are_gathered_once():
    tape = fsdp2(reshard_after_forward=False)
    assert requests(tape, Phase.FORWARD) == gathered(4)
    assert requests(tape, Phase.BACKWARD) == reduced(4, 4)


def test_mixed_precision_casts_the_part_gathers_half_as_much_and_sums_in_its_own_precision():
    cast = Counter(shard(rows, 2) for rows in ROWS)
    tape = fsdp2(mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32))
    assert requests(tape, Phase.FORWARD) == cast + gathered(2)
    assert requests(tape, Phase.BACKWARD) == cast + gathered(2) + reduced(2, 4)


def buckets(tape: Tape) -> list[int]:
    """Sizes of the buckets, in the order in which they were made, without gradients."""
    rows = [row for row in range(len(tape)) if tape.action[row] == Action.ALLOC and tape.op[row] >= 0]
    return [int(tape.size[row]) for row in rows if tape.ops[tape.op[row]] == "aten::empty" and tape.size[row] >= MIB]


@pytest.mark.parametrize("views", [False, True])
def test_the_first_bucket_ends_at_1_mib_and_the_others_at_25(views):
    layers, layer = 16, 4 * MIB  # 1024 x 1024 numbers of 4 bytes
    with mx.virtual("H100", world=2, release="2.13"), mx.record() as recording:
        dist.init_process_group("nccl")
        model = nn.Sequential(*(nn.Linear(1024, 1024, bias=False) for _ in range(layers))).cuda()
        model = DistributedDataParallel(model, gradient_as_bucket_view=views)
        for _ in range(2):
            model.zero_grad()
            model(torch.ones(4, 1024, device="cuda")).square().mean().backward()
        held = torch.cuda.memory_allocated()
    # First one bucket for all; from the second forward on one of a layer, which exceeds 1 MiB, then of seven layers,
    # the first multiple of 4 MiB beyond 25, and the rest.
    assert buckets(recording.tape) == [layers * layer, layer, 7 * layer, 7 * layer, layer]
    # Parameters, buckets, gradients unless they are views of the buckets, and two cuBLAS workspaces
    assert held == (2 if views else 3) * layers * layer + 2 * 32 * MIB
