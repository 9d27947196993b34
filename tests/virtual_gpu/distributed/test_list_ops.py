"""Ops on lists of DTensors: the shardings that DTensor finds for each element, found once for equal elements."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import memexplore as mx
from memexplore.virtual_gpu.distributed import dtensor

WIDTH = 88
"""A width of no other test: DTensor keeps what it found for the same sizes."""


def train() -> None:
    dist.init_process_group("nccl")
    mesh = dist.init_device_mesh("cuda", (4, 2), mesh_dim_names=("shard", "tensor"))
    blocks = (nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)) for _ in range(3))
    model = nn.Sequential(*blocks).cuda()
    for block in model:
        parallelize_module(block, mesh["tensor"], {"0": ColwiseParallel(), "1": RowwiseParallel()})
        fully_shard(block, mesh=mesh["shard"])
    optimizer = torch.optim.AdamW(model.parameters(), foreach=True)
    for _ in range(2):
        model(torch.ones(8, WIDTH, device="cuda")).sum().backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()


def described(found: Any) -> tuple[Any, ...]:
    again = found.redistribute_schema
    return found.output_spec, found.needs_redistribute, again and again.args_schema


def test_an_optimizer_gets_the_shardings_that_each_element_alone_has(monkeypatch):
    names = []
    once_for_equal_elements = dtensor.once_for_equal_elements

    def both(original: Any) -> Any:
        once = once_for_equal_elements(original)

        def propagate(*arguments: Any) -> Any:
            found = once(*arguments)
            schema = arguments[-1]
            if schema.op.name().startswith("aten::_foreach"):
                names.append(schema.op.name())
                assert described(found) == described(original(*arguments))
            return found

        return propagate

    monkeypatch.setattr(dtensor, "once_for_equal_elements", both)
    with mx.virtual("H100", world=8, rank=3):
        train()
    assert {"aten::_foreach_norm.Scalar", "aten::_foreach_addcdiv_.ScalarList"} <= set(names)


def test_elements_differ_where_their_types_do():
    assert dtensor.equal_elements([[1, 1.0, True, 1]]) == ([0, 1, 2], [0, 1, 2, 0])
    assert dtensor.equal_elements([["a", "b"]]) is None
    assert dtensor.equal_elements([["a", "a"], ["b"]]) is None
    assert dtensor.equal_elements([["a", "a"], []]) == ([0], [0, 0])
