"""FSDP2 on layers with fewer rows than ranks."""

import collections
from typing import Any

import pytest
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.utils._python_dispatch import TorchDispatchMode

import memexplore as mx

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


def test_more_ranks_without_a_row_are_no_more_ops() -> None:
    ops = []
    for ranks in (8, 64):
        with mx.virtual("T4", world=ranks):
            ops.append(sharded()[1])
    assert ops[0] == ops[1]
    assert ops[0]["aten.new_empty.default"] > 0


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
