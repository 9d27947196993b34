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


def peak_of_three_layers(world: int, **options: Any) -> tuple[int, int]:
    """Return the peak of the second step above the memory before it, and what the step leaves."""
    with mx.virtual("H100", world=world):
        dist.init_process_group("nccl")
        options["cpu_offload"] = CPUOffload(offload_params=True)
        layers = nn.Sequential(
            *(FullyShardedDataParallel(nn.Linear(1024, 1024, bias=False), **options) for _ in range(3))
        )
        model = FullyShardedDataParallel(layers, **options)
        optimizer = torch.optim.SGD(model.parameters())
        for _ in range(2):
            before = torch.cuda.memory_allocated()
            torch.cuda.reset_peak_memory_stats()
            model(torch.ones(4, 1024, device="cuda")).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        return torch.cuda.max_memory_allocated() - before, torch.cuda.memory_allocated() - before


WEIGHT = 1024 * 1024 * 4
"""Bytes of the weight of a layer."""
SMALL = 2 * 4 * 1024 * 4 + 2 * 512
"""The input of the first layer, the gradient of its output, the loss and its gradient."""


@pytest.mark.parametrize("world", [2, 4])
def test_parameters_on_the_cpu_are_on_the_gpu_while_their_layer_runs(world):
    # In the backward of the second layer: its weight, that of the first layer which is gathered early, the gradient of
    # the weight and its flat copy, and the shard of the gradient of the third layer, which FSDP keeps until the step.
    assert peak_of_three_layers(world) == (4 * WEIGHT + WEIGHT // world + SMALL, 0)


def test_original_parameters_keep_their_shards_on_the_gpu_while_their_layer_is_gathered():
    # As above, and the shards of the two gathered layers.
    assert peak_of_three_layers(4, use_orig_params=True) == (4 * WEIGHT + 3 * WEIGHT // 4 + SMALL, 0)


@pytest.mark.parametrize("original", [False, True])
def test_gradients_of_parameters_on_the_cpu_stay_on_the_gpu_until_they_are_reduced(original):
    with mx.virtual("H100", world=WORLD):
        dist.init_process_group("nccl")
        offload = CPUOffload(offload_params=True)
        layer = nn.Linear(1024, 1024, bias=False)
        model = FullyShardedDataParallel(layer, cpu_offload=offload, use_orig_params=original)
        (parameter,) = model.parameters()
        with model.no_sync():
            model(torch.ones(4, 1024, device="cuda")).sum().backward()
        assert (parameter.is_cpu, parameter.grad.is_cuda, parameter.grad.numel()) == (True, True, 1024 * 1024)
        model(torch.ones(4, 1024, device="cuda")).sum().backward()
        assert (parameter.grad.is_cpu, parameter.grad.numel()) == (True, 1024 * 1024 // WORLD)


def test_a_parameter_that_leaves_the_gpu_and_comes_back_keeps_its_hooks_and_its_gradient():
    seen = []
    with mx.virtual("H100"):
        weight = nn.Parameter(torch.ones(256, 256, device="cuda"))
        loss = weight.sum()
        node = weight.expand_as(weight).grad_fn.next_functions[0][0]
        node.register_hook(lambda *_: seen.append(weight.grad.shape))
        before = torch.cuda.memory_allocated()
        weight.data = weight.data.cpu()
        assert before - torch.cuda.memory_allocated() == 256 * 256 * 4
        weight.data = torch.ones(256, 256, device="cuda")
        loss.backward()
        weight.data = weight.data.cpu()
        assert (weight.is_cpu, weight.grad.is_cuda) == (True, True)
        del weight.grad
        assert weight.grad is None
    assert seen == [(256, 256)]


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
