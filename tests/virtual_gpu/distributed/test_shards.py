"""The shards of FSDP2."""

import collections
import math
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.fsdp._fully_shard._fsdp_common import _chunk_with_empty as chunk_with_empty
from torch.utils._python_dispatch import TorchDispatchMode

import memexplore as mx
from memexplore.virtual_gpu.distributed.fsdp2 import Shards

ROWS = 4


class Ops(TorchDispatchMode):
    """Counts ops by their names."""

    def __init__(self) -> None:
        super().__init__()
        self.count: collections.Counter[str] = collections.Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count[str(func)] += 1
        return func(*args, **(kwargs or {}))


def sharded() -> tuple[nn.Linear, collections.Counter[str]]:
    """A layer sharded on one rank, and the ops of sharding it."""
    dist.init_process_group("nccl")
    layer = nn.Linear(3, ROWS, device="cuda")
    with Ops() as ops:
        fully_shard(layer)
    return layer, ops.count


def test_sharding_on_more_ranks_takes_as_many_ops() -> None:
    ops = []
    for ranks in (8, 64):
        with mx.virtual("T4", world=ranks):
            ops.append(sharded()[1].total())
    assert ops[0] == ops[1] > 0


@pytest.mark.parametrize("ranks", range(1, 8))
@pytest.mark.parametrize(("shape", "dim"), [((5, 3), 0), ((6,), 0), ((1, 4), 1), ((0, 2), 0)])
def test_shards_are_those_of_torch(shape: tuple[int, ...], dim: int, ranks: int) -> None:
    tensor = torch.arange(math.prod(shape)).view(shape)
    ours, theirs = Shards(tensor, ranks, dim), chunk_with_empty(tensor, ranks, dim)
    assert [shard.tolist() for shard in ours] == [shard.tolist() for shard in theirs]
    assert [shard.shape for shard in ours[:]] == [shard.shape for shard in theirs]


@pytest.mark.parametrize(("rank", "rows"), [(0, 1), (ROWS - 1, 1), (ROWS, 0), (7, 0)])
def test_a_rank_has_its_row_or_none(rank: int, rows: int) -> None:
    with mx.virtual("T4", world=8, rank=rank):
        layer, _ = sharded()
        assert layer.weight.to_local().shape == (rows, 3)
        assert layer.weight.full_tensor().shape == (ROWS, 3)


def test_torch_splits_as_before_when_the_virtual_gpu_is_off() -> None:
    from torch.distributed.fsdp._fully_shard import _fsdp_param

    before = _fsdp_param._chunk_with_empty
    with mx.virtual("T4", world=8):
        sharded()
        assert _fsdp_param._chunk_with_empty is not before
    assert _fsdp_param._chunk_with_empty is before
