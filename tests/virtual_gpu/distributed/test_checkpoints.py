"""torch.distributed.checkpoint on one rank: its part is saved and loaded, and takes no memory of the GPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    get_state_dict,
    set_model_state_dict,
    set_state_dict,
)
from torch.distributed.fsdp import FullOptimStateDictConfig, FullyShardedDataParallel, StateDictType, fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer

import memexplore as mx
from tests.small import allocated


def trained() -> tuple[nn.Module, Any]:
    """A sharded model with the states of its optimizer."""
    model = nn.Sequential(*(nn.Linear(256, 256, device="cuda") for _ in range(2)))
    for layer in model:
        fully_shard(layer)
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters())
    step(model, optimizer)
    return model, optimizer


def step(model: nn.Module, optimizer: Any) -> None:
    model(torch.ones(4, 256, device="cuda")).sum().backward()
    optimizer.step()
    optimizer.zero_grad()


@pytest.mark.parametrize("rank", [0, 3])
def test_a_sharded_run_is_saved_and_loaded_by_its_rank(tmp_path, rank):
    with mx.virtual("H100", world=4, rank=rank), mx.record() as recording:
        dist.init_process_group("nccl")
        model, optimizer = trained()
        before = allocated()
        weights, states = get_state_dict(model, optimizer)
        dcp.save({"model": weights, "optimizer": states}, checkpoint_id=tmp_path)
        loaded = {"model": get_model_state_dict(model), "optimizer": get_optimizer_state_dict(model, optimizer)}
        dcp.load(loaded, checkpoint_id=tmp_path)
        set_state_dict(model, optimizer, model_state_dict=loaded["model"], optim_state_dict=loaded["optimizer"])
        del weights, states, loaded
        assert allocated() == before
        step(model, optimizer)
    assert any("no whole checkpoint" in note for note in recording.tape.meta.notes)


def test_a_run_is_saved_by_a_thread(tmp_path):
    with mx.virtual("H100", world=2, rank=1):
        dist.init_process_group("cpu:gloo,cuda:nccl")
        model, _ = trained()
        before = allocated()
        dcp.async_save({"model": get_model_state_dict(model)}, checkpoint_id=tmp_path).result()
        assert allocated() == before
        assert (tmp_path / ".metadata").exists()


@pytest.mark.parametrize(("rank", "names"), [(0, 4), (1, 0)])
def test_a_whole_state_dict_is_gathered_on_rank_0_and_sent_by_it(rank, names):
    options = StateDictOptions(full_state_dict=True, cpu_offload=True)
    with mx.virtual("H100", world=2, rank=rank):
        dist.init_process_group("nccl")
        model, optimizer = trained()
        before = allocated()
        weights = get_model_state_dict(model, options=options)
        assert len(weights) == names
        set_model_state_dict(model, weights, options=StateDictOptions(full_state_dict=True, broadcast_from_rank0=True))
        assert allocated() == before
        step(model, optimizer)


@pytest.mark.parametrize("rank", [0, 3])
def test_the_optimizer_of_fsdp1_is_gathered_with_the_parameters_of_other_ranks(rank):
    with mx.virtual("H100", world=4, rank=rank):
        dist.init_process_group("nccl")
        # A quarter of the numbers for each rank: rank 0 has no part of the second layer, rank 3 none of the first.
        layers = nn.Sequential(nn.Linear(256, 256), nn.Linear(256, 256))
        shapes = {name: weight.shape for name, weight in layers.named_parameters()}
        model = FullyShardedDataParallel(layers, use_orig_params=True, device_id=torch.cuda.current_device())
        optimizer = torch.optim.AdamW(model.parameters())
        step(model, optimizer)
        assert len(optimizer.state) < len(shapes)
        before = allocated()
        on_gpu = FullOptimStateDictConfig(offload_to_cpu=False)
        with FullyShardedDataParallel.state_dict_type(model, StateDictType.FULL_STATE_DICT, None, on_gpu):
            states = FullyShardedDataParallel.optim_state_dict(model, optimizer)
            assert {name: state["exp_avg"].shape for name, state in states["state"].items()} == shapes
            # Both moments, whole, without the flat gradient, of which `zero_grad` has dropped the views only.
            whole = sum(shape.numel() for shape in shapes.values()) * 4
            assert allocated() - before == 2 * whole - whole // 4
            optimizer.load_state_dict(FullyShardedDataParallel.optim_state_dict_to_load(model, optimizer, states))
        step(model, optimizer)


@pytest.mark.parametrize("rank", [0, 1])
def test_the_states_of_a_sharded_optimizer_are_brought_to_rank_0(rank):
    sizes = (512, 768, 1024)
    # The largest weight is one rank's, the others are the other rank's.
    parts = {0: [1024], 1: [768, 512]}
    with mx.virtual("H100", world=2, rank=rank):
        dist.init_process_group("nccl")
        weights = [nn.Parameter(torch.ones(size, 1024, device="cuda")) for size in sizes]
        optimizer = ZeroRedundancyOptimizer(weights, torch.optim.Adam, foreach=False)
        for weight in weights:
            weight.grad = torch.zeros_like(weight)
        optimizer.step()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        optimizer.consolidate_state_dict(to=0)
        # The state of the other rank arrives as bytes and is loaded beside them; that of this rank is sent as bytes.
        moments = 2 * 4096 * sum(parts[1])
        copies = 2 if rank == 0 else 1
        added = torch.cuda.max_memory_allocated() - before
        assert copies * moments <= added <= copies * moments + 3 * 2**20
        assert torch.cuda.memory_allocated() == before
        if rank == 0:
            states = optimizer.state_dict()["state"]
            assert [states[index]["exp_avg"].shape for index in range(3)] == [(size, 1024) for size in sizes]
