"""FSDP2 and tensor parallelism on a virtual GPU: shards, gathered parameters and their release."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.distributed.tensor.experimental import context_parallel
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    SequenceParallel,
    loss_parallel,
    parallelize_module,
)
from torch.nn.attention import SDPBackend, sdpa_kernel

import memexplore as mx
from tests.small import allocated
from tests.virtual_gpu.torch_state import functions

MIB = 2**20
RELEASE = "2.13"
"""Its rules give the backward pass a cuBLAS workspace of its own."""
LAYERS = 4
LAYER = 4 * MIB  # 1024 x 1024 numbers of 4 bytes
COPIES = 2 if tuple(map(int, torch.__version__.split(".")[:2])) >= (2, 15) else 3
"""Whole layers alive while one is copied out: parameters, buffer, and before torch 2.15 the last layer's buffer."""
WORKSPACES = 2 * 32 * MIB  # of cuBLAS on an H100, one for each thread: forward and backward


def layers(number: int = LAYERS) -> nn.Sequential:
    return nn.Sequential(*(nn.Linear(1024, 1024, bias=False) for _ in range(number)))


def sharded(mesh: Any = None, **options: Any) -> nn.Sequential:
    """A model of which this rank holds its shards only."""
    with torch.device("meta"):
        model = layers()
    for layer in model:
        fully_shard(layer, mesh=mesh, **options)
    fully_shard(model, mesh=mesh, **options)
    return model.to_empty(device="cuda")


def train(model: nn.Module, device: str = "cuda", steps: int = 2) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for _ in range(steps):
        optimizer.zero_grad()
        model(torch.ones(4, 1024, device="cuda")).sum().backward()
        optimizer.step()


@pytest.mark.parametrize("world", [2, 8, 1024])
def test_a_trained_model_is_three_shards(world):
    with mx.virtual("H100", release=RELEASE):
        dist.init_process_group("nccl", rank=0, world_size=world)
        model = sharded()
        shard = LAYERS * LAYER // world
        assert allocated() == shard
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        for _ in range(2):
            optimizer.zero_grad()
            model(torch.ones(4, 1024, device="cuda")).sum().backward()
            optimizer.step()
        # parameters, gradients, momentum
        assert allocated() == 3 * shard + WORKSPACES


def test_gathered_parameters_are_freed_after_each_layer():
    with mx.virtual("H100", release=RELEASE):
        dist.init_process_group("nccl", rank=0, world_size=8)
        model = sharded()
        before = allocated()
        torch.cuda.reset_peak_memory_stats()
        with torch.no_grad():
            model(torch.ones(4, 1024, device="cuda"))
        # While a layer is copied out; the parameters of the layer before were freed. Outputs take 16 KiB each.
        peak = torch.cuda.max_memory_allocated() - before - WORKSPACES // 2
        assert COPIES * LAYER <= peak <= COPIES * LAYER + 4 * 16 * 1024
        assert allocated() - before == WORKSPACES // 2


def test_parameters_kept_after_forward_are_all_gathered():
    with mx.virtual("H100", release=RELEASE):
        dist.init_process_group("nccl", rank=0, world_size=8)
        model = sharded(reshard_after_forward=False)
        before = allocated()
        output = model(torch.ones(4, 1024, device="cuda"))
        # Every layer's parameters, the last buffer, and activations of less than 1 MiB
        kept = allocated() - before - WORKSPACES // 2
        assert LAYERS * LAYER <= kept < (LAYERS + 1) * LAYER + MIB
        output.sum().backward()
        del output
        # Shards of the gradients
        assert allocated() - before == LAYERS * LAYER // 8 + WORKSPACES


def test_mixed_precision_gathers_half_as_much():
    with mx.virtual("H100", release=RELEASE):
        dist.init_process_group("nccl", rank=0, world_size=8)
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        model = sharded(mp_policy=policy)
        torch.cuda.reset_peak_memory_stats()
        before = allocated()
        with torch.no_grad():
            assert model(torch.ones(4, 1024, device="cuda")).dtype is torch.bfloat16
        # As above with 2 bytes for a number, and the shard cast to bfloat16
        peak = torch.cuda.max_memory_allocated() - before - WORKSPACES // 2
        assert COPIES * LAYER // 2 <= peak <= COPIES * LAYER // 2 + LAYER // 16 + 4 * 16 * 1024
        train(model)
        assert {parameter.grad.dtype for parameter in model.parameters()} == {torch.float32}


def test_replicated_shards_are_those_of_the_inner_dimension():
    with mx.virtual("H100", release=RELEASE):
        dist.init_process_group("nccl", rank=0, world_size=8)
        mesh = dist.init_device_mesh("cuda", (2, 4), mesh_dim_names=("replicate", "shard"))
        model = sharded(mesh)
        assert allocated() == LAYERS * LAYER // 4
        train(model)


def test_offloaded_shards_take_no_memory_of_the_gpu():
    with mx.virtual("H100", release=RELEASE):
        dist.init_process_group("nccl", rank=0, world_size=8)
        model = layers()
        for layer in model:
            fully_shard(layer, offload_policy=CPUOffloadPolicy())
        fully_shard(model, offload_policy=CPUOffloadPolicy())
        train(model)
        assert {parameter.device.type for parameter in model.parameters()} == {"cpu"}
        assert allocated() <= WORKSPACES + 512


def test_a_group_of_one_rank_gathers_nothing():
    with mx.virtual("H100", release=RELEASE):
        dist.init_process_group("nccl", rank=0, world_size=1)
        model = sharded()
        assert allocated() == LAYERS * LAYER
        train(model)
        # Parameters and gradients: the optimizer is gone.
        assert allocated() == 2 * LAYERS * LAYER + WORKSPACES


def test_tensor_parallelism_shards_weights_and_activations():
    with mx.virtual("H100", release=RELEASE):
        mesh = dist.init_device_mesh("cuda", (1,))
        assert mesh.size() == 1
    with mx.virtual("H100", release=RELEASE):
        dist.init_process_group("nccl", rank=0, world_size=8)
        mesh = dist.init_device_mesh("cuda", (8,))
        model = layers(2).cuda()
        assert allocated() == 2 * LAYER
        parallelize_module(model, mesh, {"0": ColwiseParallel(), "1": RowwiseParallel()})
        assert allocated() == 2 * LAYER // 8
        output = model(torch.ones(4, 1024, device="cuda"))
        assert output.shape == (4, 1024)
        output.sum().backward()
        assert model[0].weight.grad.to_local().shape == (128, 1024)


def test_a_wrapper_says_the_device_of_its_tensor():
    with mx.virtual("H100", release=RELEASE):
        dist.init_process_group("nccl", rank=0, world_size=2)
        weight = sharded()[0].weight
        assert (weight.device, weight.is_cuda, weight.is_meta) == (torch.device("cuda", 0), True, False)


def test_torch_is_restored_after_a_sharded_run():
    def run() -> None:
        dist.init_process_group("nccl", rank=0, world_size=2)
        train(sharded(), steps=1)

    mx.simulate(run)
    every_function = functions()
    mx.simulate(run)
    assert functions() == every_function


@pytest.mark.parametrize("options", [{}, {"is_causal": True}])
def test_attention_on_shards_runs_the_fused_kernel(options):
    with mx.virtual("A100"), torch.no_grad():
        dist.init_process_group("nccl", rank=0, world_size=2)
        mesh = dist.device_mesh.init_device_mesh("cuda", (2,))
        whole = torch.empty(4, 8, 1024, 64, device="cuda", dtype=torch.bfloat16)
        query = distribute_tensor(whole, mesh, [Shard(0)])
        before = allocated()
        torch.cuda.reset_peak_memory_stats()
        result = nn.functional.scaled_dot_product_attention(query, query, query, **options)
        # Half of the result, its sums in float32, a few numbers; the scores would take 2 * 8 * 1024 * 1024 * 2 bytes.
        assert allocated() - before == 2 * 8 * 1024 * 64 * 2
        assert torch.cuda.max_memory_allocated() - before <= 2 * 8 * 1024 * (64 * 2 + 4) + 4096
        assert (result.shape, result.placements) == (whole.shape, (Shard(0),))


@pytest.mark.parametrize(
    "run",
    [
        lambda x, weight: nn.functional.dropout(x, 0.1),
        lambda x, weight: nn.functional.softmax(x, -1, dtype=torch.float32),
        lambda x, weight: nn.functional.rms_norm(x, (1024,), weight),
        lambda x, weight: nn.functional.silu(x),
    ],
)
def test_ops_on_shards_keep_the_memory_of_the_same_ops_on_local_tensors(run):
    held = []
    with mx.virtual("A100"):
        dist.init_process_group("nccl", rank=0, world_size=2)
        mesh = dist.device_mesh.init_device_mesh("cuda", (2,))
        whole, weight = (torch.empty(*shape, device="cuda", dtype=torch.float16) for shape in ((1024, 1024), (1024,)))
        shards = distribute_tensor(whole, mesh, [Shard(0)]), distribute_tensor(weight, mesh, [Replicate()])
        for tensors in (shards, (whole[:512].contiguous(), weight)):
            source = tensors[0].requires_grad_()
            before = allocated()
            result = run(source, tensors[1])
            held.append(allocated() - before)
            result.backward(torch.empty_like(result))
            assert source.grad.shape == source.shape
            del result
            source.grad = None
    assert held[0] == held[1] >= 512 * 1024 * 2


def test_autocast_does_not_reach_dtensors_and_a_note_says_so():
    with mx.virtual("A100"):
        dist.init_process_group("nccl", rank=0, world_size=2)
        mesh = dist.device_mesh.init_device_mesh("cuda", (2,))
        shard = distribute_tensor(torch.empty(4, 4, device="cuda"), mesh, [Shard(0)])
        weight = distribute_tensor(torch.empty(4, 4, device="cuda"), mesh, [Replicate()])
        with mx.record() as recording, torch.autocast("cuda", torch.bfloat16):
            assert nn.functional.linear(shard, weight).dtype is torch.float32
    assert any("autocast does not reach DTensors" in note for note in recording.tape.meta.notes)


def test_random_initialisation_of_shards_makes_no_request():
    with mx.virtual("H100", world=4, rank=1):
        dist.init_process_group("nccl")
        model = sharded()
        before = allocated()
        torch.cuda.reset_peak_memory_stats()
        with torch.no_grad():
            model[0].reset_parameters()
            nn.init.uniform_(model[1].weight)
            nn.init.normal_(model[2].weight)
        assert torch.cuda.max_memory_allocated() == before


@pytest.mark.parametrize("rank", [0, 3])
def test_a_plan_of_tensor_and_sequence_parallelism_trains_with_a_parallel_loss(rank):
    with mx.virtual("H100", world=4, rank=rank, release=RELEASE):
        dist.init_process_group("nccl")
        mesh = dist.init_device_mesh("cuda", (2, 2), mesh_dim_names=("data", "tensor"))
        with torch.device("meta"):
            model = nn.Sequential(nn.LayerNorm(1024), *layers(2))
        plan = {
            "0": SequenceParallel(),
            "1": ColwiseParallel(input_layouts=Shard(1), output_layouts=Shard(-1)),
            "2": RowwiseParallel(output_layouts=Shard(-1), use_local_output=False),
        }
        parallelize_module(model, mesh["tensor"], plan)
        fully_shard(model, mesh=mesh["data"])
        model.to_empty(device="cuda")
        # Two matrices in 4 parts, and the norm's weight and bias of 4 KiB in the 2 parts of the data.
        parameters = 2 * LAYER // 4 + 2 * 4096 // 2
        assert allocated() == parameters
        optimizer = torch.optim.AdamW(model.parameters())
        for _ in range(2):
            targets = torch.ones(4 * 8, dtype=torch.int64, device="cuda")
            with loss_parallel():
                output = model(torch.ones(4, 4, 1024, device="cuda"))
                loss = nn.functional.cross_entropy(output.flatten(0, 1), targets)
                loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            del output, loss, targets
        steps = 512 * sum(1 for _ in model.parameters()) if optimizer.defaults["capturable"] else 0
        assert allocated() == 3 * parameters + WORKSPACES + steps


def test_the_backward_pass_of_a_parallel_loss_has_the_line_of_the_loss():
    def run() -> None:
        mesh = dist.init_device_mesh("cuda", (4,))
        scores = torch.ones(8, 1000, device="cuda", requires_grad=True)
        targets = torch.ones(8, dtype=torch.int64, device="cuda")
        with loss_parallel():
            loss = nn.functional.cross_entropy(distribute_tensor(scores, mesh, [Shard(1)]), targets)
            loss.backward()

    tape = mx.simulate(run, gpu="H100", world=4)
    events = tape.to_pandas().query("action == 'alloc' and phase == 'backward' and size == 8000")
    # The zeros and the products of the gradient of this rank's part, 8 x 250 numbers of 4 bytes.
    assert list(events["op"]) == ["aten::zeros_like", "aten::exp", "aten::add", "aten::mul"]
    line = run.__code__.co_firstlineno + 5
    for row in events.index:
        frames = tape.stacks[tape.stack[row]]
        assert line in [frame.line for frame in frames if frame.filename == __file__]


@pytest.mark.parametrize("backend", [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION])
def test_context_parallel_holds_the_part_of_the_sequence(backend):
    with mx.virtual("A100", world=4, rank=1):
        dist.init_process_group("nccl")
        mesh = dist.init_device_mesh("cuda", (4,))
        query, key, value = (torch.ones(1, 4, 1024, 64, device="cuda", dtype=torch.bfloat16) for _ in range(3))
        with sdpa_kernel(backend), context_parallel(mesh, buffers=(query, key, value), buffer_seq_dims=(2, 2, 2)):
            before = allocated()
            torch.cuda.reset_peak_memory_stats()
            with torch.no_grad():
                result = nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True)
            assert result.shape == (1, 4, 256, 64)
            # Keys and values of all ranks are 4 * 2 parts of 128 KiB. The scores of a quarter of the rows would be
            # 2 MiB in each of several tensors.
            assert torch.cuda.max_memory_allocated() - before < 2 * MIB + MIB // 2


def test_ranks_with_equal_meshes_run_after_each_other():
    held = []
    for rank in (0, 3):
        with mx.virtual("H100", world=4, rank=rank):
            dist.init_process_group("nccl")
            mesh = dist.init_device_mesh("cuda", (2, 2))
            whole = distribute_tensor(torch.ones(3, 1024, device="cuda"), mesh, [Replicate(), Shard(0)])
            doubled = whole + whole
            assert doubled.full_tensor().shape == (3, 1024)
            held.append((doubled.to_local().shape[0], doubled.device_mesh is mesh))
    # Of 3 rows, the first of two ranks has 2.
    assert held == [(2, True), (1, True)]


def test_shardings_are_computed_on_the_gpu_of_the_rank():
    # The bias has the same shape for both ranks, the weight has not.
    for rank, inputs in ((7, 32), (0, 64)):
        with mx.virtual("H100", world=8, rank=rank):
            torch.cuda.set_device(rank)
            mesh = dist.init_device_mesh("cuda", (8,))
            layer = parallelize_module(nn.Linear(inputs, 256).cuda(), mesh, ColwiseParallel())
            assert layer(torch.ones(16, inputs, device="cuda")).shape == (16, 32)
