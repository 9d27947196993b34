"""Reductions of tensors on the CPU, by a group of gloo beside the virtual GPU: every rank has the same values."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

import memexplore as mx

Op = dist.ReduceOp


@pytest.mark.parametrize(("op", "result"), [(Op.SUM, 12.0), (Op.PRODUCT, 81.0), (Op.MAX, 3.0), (Op.AVG, 3.0)])
def test_an_all_reduce_on_the_cpu_is_of_equal_values(op, result):
    with mx.virtual("H100", world=4):
        dist.init_process_group("nccl")
        value = torch.tensor([3.0])
        dist.all_reduce(value, op, dist.new_group(backend="gloo"))
        assert value.item() == result


def test_the_group_of_a_reduction_counts():
    with mx.virtual("H100", world=4):
        dist.init_process_group("gloo")
        whole, pair = torch.tensor([3, 4]), torch.tensor([3, 4])
        dist.reduce(whole, 0)
        dist.all_reduce(pair, group=dist.new_group([0, 1]), async_op=True).wait()
        assert (whole.tolist(), pair.tolist()) == ([12, 16], [6, 8])
