"""Categories of several ranks: what collectives, DDP and FSDP do with a block decides its category."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel

import memexplore as mx
from memexplore.tape import Action, Category, Communicator, Tape

WORLD = 4
WEIGHT = 4 * 512 * 512  # bytes of a layer without bias: 1 MiB
LAYERS = 3
STEPS = 2
BATCH = 8


def layers() -> nn.Sequential:
    return nn.Sequential(*(nn.Linear(512, 512, bias=False) for _ in range(LAYERS))).cuda()


def train(model: nn.Module) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(STEPS):
        model(torch.ones(BATCH, 512, device="cuda")).sum().backward()
        optimizer.step()
        optimizer.zero_grad()


def recorded(program: Callable[[], object], world: int | None = WORLD) -> Tape:
    with mx.virtual("H100", world=world, rank=WORLD - 1 if world else 0), mx.record() as recording:
        if world:
            dist.init_process_group("nccl")
        program()
    return recording.tape


def requests(tape: Tape, category: Category) -> list[tuple[str, int]]:
    """Return op and size of each request of a category."""
    rows = np.flatnonzero((tape.action == Action.ALLOC) & (tape.category == category))
    return [(tape.ops[tape.op[row]], int(tape.size[row])) for row in rows]


def total(tape: Tape, category: Category) -> int:
    return sum(size for _, size in requests(tape, category))


def test_fsdp2_gathers_parameters_and_reduces_buckets() -> None:
    def program() -> None:
        model = layers()
        for layer in model:
            fully_shard(layer)
        train(fully_shard(model))

    tape = recorded(program)
    gathered = requests(tape, Category.GATHERED_PARAMETER)
    # Forward and backward of each step gather each layer into a buffer and copy it out: 2 * WEIGHT.
    assert sum(size for _, size in gathered) == STEPS * 2 * LAYERS * 2 * WEIGHT
    # The input of each reduce-scatter is the gradient of a layer.
    assert total(tape, Category.GRADIENT_BUCKET) == STEPS * LAYERS * WEIGHT
    assert not requests(tape, Category.COMMUNICATION_BUFFER)


def test_parameters_cast_for_the_all_gather_are_communication_buffers() -> None:
    def program() -> None:
        model = layers()
        for layer in model:
            fully_shard(layer, mp_policy=MixedPrecisionPolicy(torch.bfloat16, torch.float32))
        train(fully_shard(model))

    tape = recorded(program)
    # bfloat16 has half of the bytes: a shard of each layer, and each layer twice, in forward and backward
    assert total(tape, Category.COMMUNICATION_BUFFER) == STEPS * 2 * LAYERS * WEIGHT // 2 // WORLD
    assert total(tape, Category.GATHERED_PARAMETER) == STEPS * 2 * LAYERS * 2 * WEIGHT // 2
    # in the type of the reduction
    assert total(tape, Category.GRADIENT_BUCKET) == STEPS * LAYERS * WEIGHT


def test_fsdp1_keeps_the_category_of_a_flat_parameter_that_is_resized() -> None:
    def program() -> None:
        train(FullyShardedDataParallel(layers(), auto_wrap_policy=None, use_orig_params=True))

    tape = recorded(program)
    # One flat parameter, which the root keeps from forward to backward.
    assert requests(tape, Category.GATHERED_PARAMETER) == [("UntypedStorage.resize_", LAYERS * WEIGHT)] * STEPS
    assert total(tape, Category.GRADIENT_BUCKET) == STEPS * LAYERS * WEIGHT


@pytest.mark.parametrize("as_view", [False, True])
def test_buckets_of_ddp(as_view: bool) -> None:
    tape = recorded(lambda: train(DistributedDataParallel(layers(), gradient_as_bucket_view=as_view)))
    # One bucket at the construction; at the second forward one of at least 1 MiB and one for the rest.
    assert [size for _, size in requests(tape, Category.GRADIENT_BUCKET)] == [LAYERS * WEIGHT, WEIGHT, 2 * WEIGHT]
    assert {op for op, _ in requests(tape, Category.GRADIENT_BUCKET)} == {"aten::empty"}
    # The weights of rank 0 arrive in one flat tensor.
    assert ("aten::cat", LAYERS * WEIGHT) in requests(tape, Category.COMMUNICATION_BUFFER)


def test_collectives_by_hand() -> None:
    def program() -> None:
        model = layers()
        model(torch.ones(BATCH, 512, device="cuda")).sum().backward()
        gradients = torch.cat([weight.grad.flatten() for weight in model.parameters()])  # type: ignore[union-attr]
        dist.all_reduce(gradients)
        full = torch.empty(WORLD * 512, 512, device="cuda")
        dist.all_gather_into_tensor(full, model[0].weight)
        received = torch.empty(100, device="cuda")
        dist.recv(received, 0)
        parts = [torch.empty(200, device="cuda") for _ in range(WORLD)]
        dist.all_gather(parts, torch.ones(200, device="cuda"))
        del gradients, full, received, parts
        torch.empty(8, device="cuda")

    tape = recorded(program)
    assert requests(tape, Category.GRADIENT_BUCKET) == [("aten::cat", LAYERS * WEIGHT)]
    assert requests(tape, Category.GATHERED_PARAMETER) == [("aten::empty", WORLD * WEIGHT)]
    buffers = sorted(size for _, size in requests(tape, Category.COMMUNICATION_BUFFER))
    # what is received, the parts of an all-gather, and the flat buffer of NCCL for them
    assert buffers == [400, *[800] * WORLD, WORLD * 800]


def test_a_tape_says_its_rank_and_its_communicators() -> None:
    def program() -> None:
        pair = dist.new_group([2, 3])
        dist.new_group([0, 1, 2, 3])  # without a collective, so NCCL makes no communicator
        tensor = torch.ones(4, device="cuda")
        dist.all_reduce(tensor)
        dist.all_to_all_single(torch.empty_like(tensor), tensor, group=pair)
        dist.destroy_process_group()

    meta = recorded(program).meta
    assert (meta.rank, meta.world) == (3, 4)
    assert meta.communicators == (Communicator(4), Communicator(2, all_to_all=True))


def test_one_process_has_no_such_category() -> None:
    tape = recorded(lambda: train(layers()), world=None)
    assert tape.category.max() < Category.UNKNOWN + 1
    assert (tape.meta.rank, tape.meta.world, tape.meta.communicators) == (None, None, ())
