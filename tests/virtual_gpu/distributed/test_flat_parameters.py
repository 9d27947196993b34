"""FSDP1 on one rank: parameters on the CPU, and state dicts of what other ranks have."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import CPUOffload, FullyShardedDataParallel, StateDictType

import memexplore as mx

WORLD = 4
COUNT = 64 * 64 + 64
"""Numbers of a layer, which four ranks share evenly."""


def trained(**options: Any) -> tuple[FullyShardedDataParallel, torch.optim.Optimizer]:
    dist.init_process_group("nccl")
    layers = nn.Sequential(*(FullyShardedDataParallel(nn.Linear(64, 64), **options) for _ in range(2)))
    model = FullyShardedDataParallel(layers, **options)
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.ones(4, 64, device="cuda")).sum().backward()
    optimizer.step()
    return model, optimizer


def test_parameters_on_the_cpu_end_in_one_sentence():
    with mx.virtual("H100", world=WORLD), pytest.raises(RuntimeError, match="Use fully_shard with CPUOffloadPolicy"):
        trained(cpu_offload=CPUOffload(offload_params=True))


def test_a_tensor_moved_by_its_data_does_not_count_the_writes_to_the_other():
    with mx.virtual("H100"):
        weight = nn.Parameter(torch.ones(256, 256))
        shard = torch.ones(256, 256, device="cuda")
        weight.data = shard
        out = (torch.ones(4, 256, device="cuda", requires_grad=True) @ weight.t()).sum()
        shard.zero_()
        out.backward()


@pytest.mark.parametrize("rank", [0, 3])
def test_a_local_state_dict_knows_the_shards_of_all_ranks(rank):
    with mx.virtual("H100", world=WORLD, rank=rank):
        model, _ = trained(device_id=torch.cuda.current_device())
        with FullyShardedDataParallel.state_dict_type(model, StateDictType.LOCAL_STATE_DICT):
            states = model.state_dict()
            model.load_state_dict(states)
        for tensor in states.values():
            shards = tensor.metadata().shards_metadata
            part = COUNT // WORLD
            assert [(one.shard_offsets, one.shard_sizes) for one in shards] == [([i * part], [part]) for i in range(4)]


@pytest.mark.parametrize("rank", [0, 3])
def test_optimizer_states_have_the_names_that_rank_0_sends(rank):
    with mx.virtual("H100", world=WORLD, rank=rank):
        model, optimizer = trained(device_id=torch.cuda.current_device())
        with FullyShardedDataParallel.state_dict_type(model, StateDictType.FULL_STATE_DICT):
            states = FullyShardedDataParallel.optim_state_dict(model, optimizer)
        assert set(states["state"]) == {"0.weight", "0.bias", "1.weight", "1.bias"}
