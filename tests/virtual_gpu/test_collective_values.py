"""Known values after collectives: those of this rank for every rank, and unknown where that is not enough."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist

import memexplore as mx
from memexplore.virtual_gpu.values import known_values


def known(tensor: torch.Tensor) -> list[int] | None:
    value = known_values.of(tensor)
    return None if value is None else value.tolist()


def ints(*numbers: int) -> torch.Tensor:
    return torch.tensor(numbers, device="cuda")


def reduced(world: int, op: dist.ReduceOp.RedOpType) -> list[int] | None:
    with mx.virtual("T4"):
        dist.init_process_group("nccl", rank=world - 1, world_size=world)
        x = ints(3, 5)
        dist.all_reduce(x, op=op)
        return known(x)


@pytest.mark.parametrize("op", [dist.ReduceOp.SUM, dist.ReduceOp.MAX, dist.ReduceOp.AVG])
def test_a_reduction_of_one_rank_keeps_its_values(op):
    assert reduced(1, op) == [3, 5]


def test_a_reduction_of_several_ranks_takes_the_values_of_this_rank_for_each():
    assert reduced(8, dist.ReduceOp.MAX) == reduced(8, dist.ReduceOp.MIN) == reduced(8, dist.ReduceOp.AVG) == [3, 5]
    assert reduced(8, dist.ReduceOp.SUM) == [24, 40]  # 8 x 3, 8 x 5
    assert reduced(2, dist.ReduceOp.PRODUCT) == [9, 25]  # 3 x 3, 5 x 5
    assert reduced(8, dist.ReduceOp.BXOR) is None


def _gathered() -> torch.Tensor:
    whole = torch.empty(4, dtype=torch.int64, device="cuda")
    dist.all_gather_into_tensor(whole, ints(3, 5))
    return whole


def _gathered_in_parts() -> torch.Tensor:
    whole = torch.empty(4, dtype=torch.int64, device="cuda")
    dist.all_gather(list(whole.split(2)), ints(3, 5))
    return whole


def _exchanged() -> torch.Tensor:
    whole = torch.empty(4, dtype=torch.int64, device="cuda")
    dist.all_to_all_single(whole, ints(1, 2, 3, 4))
    return whole


def _scattered() -> torch.Tensor:
    part = torch.empty(2, dtype=torch.int64, device="cuda")
    dist.reduce_scatter_tensor(part, ints(1, 2, 3, 4), op=dist.ReduceOp.MAX)
    return part


def _sent() -> torch.Tensor:
    x = ints(7)
    dist.broadcast(x, 0)
    return x


def _received() -> torch.Tensor:
    x = ints(7)
    dist.recv(x, 0)
    return x


@pytest.mark.parametrize(
    ("run", "expected"),
    [
        (_gathered, [3, 5, 3, 5]),
        (_gathered_in_parts, [3, 5, 3, 5]),
        (_exchanged, [3, 4, 3, 4]),  # each of the two ranks sends its second half to rank 1
        (_scattered, [3, 4]),
        (_sent, [7]),
        (_received, None),
    ],
)
def test_every_rank_has_the_values_of_this_rank(run: Callable[[], torch.Tensor], expected: list[int] | None):
    with mx.virtual("T4"):
        dist.init_process_group("nccl", rank=1, world_size=2)
        assert known(run()) == expected


@pytest.mark.parametrize(
    ("source", "read", "noted"),
    [
        (0, lambda number: number.item(), True),
        (0, lambda number: number.tolist(), True),
        (0, lambda number: number.cpu(), True),
        (0, lambda number: number.nonzero(), True),
        (0, lambda number: (number + 1).int().item(), True),
        (0, lambda number: bool(number > 0), True),
        (1, lambda number: number.item(), False),  # this rank itself sends it
        (0, lambda number: number.fill_(3).item(), False),
        (0, lambda number: (number * torch.ones(1, device="cuda")).item(), False),  # such as a loss of sent weights
    ],
)
def test_a_placeholder_for_what_another_rank_broadcasts_is_noted_where_it_is_read(source, read, noted):
    with mx.virtual("T4"), mx.record() as recording:
        dist.init_process_group("nccl", rank=1, world_size=2)
        number = ints(0)
        dist.broadcast(number, source)
        read(number)
    assert any("what rank 0 has broadcast" in note for note in recording.tape.meta.notes) == noted


def test_a_part_of_an_unknown_tensor_stays_unknown():
    with mx.virtual("T4"):
        dist.init_process_group("nccl", rank=0, world_size=2)
        whole = torch.empty(6, dtype=torch.int64, device="cuda")
        dist.all_gather_into_tensor(whole[:4], ints(3, 5))
        assert known(whole) is None


def test_a_functional_collective_of_several_ranks_is_unknown():
    import torch.distributed._functional_collectives as functional

    with mx.virtual("T4"):
        dist.init_process_group("gloo", rank=0, world_size=2)
        result = functional.all_reduce(ints(3), "sum", dist.group.WORLD)
        assert known(functional.wait_tensor(result)) is None
