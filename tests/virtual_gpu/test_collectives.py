"""Collectives on virtual tensors: what they allocate, and how long asynchronous ones keep their inputs."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist

import memexplore as mx
from tests.small import allocated

WORLD = 8
MIB = 2**20


@pytest.fixture(autouse=True)
def group() -> Iterator[None]:
    with mx.virtual("T4"):
        dist.init_process_group("nccl", rank=3, world_size=WORLD)
        yield


def tensor(mib: int = 1) -> torch.Tensor:
    return torch.empty(mib * MIB // 4, device="cuda")


def peak_of(run: object) -> tuple[int, int]:
    """Return the bytes that a function leaves allocated, and those it needs besides at its peak."""
    before = allocated()
    torch.cuda.reset_peak_memory_stats()
    run()  # type: ignore[operator]
    return allocated() - before, torch.cuda.max_memory_allocated() - before


def test_collectives_in_place_allocate_nothing():
    x = tensor(4)
    for run in (
        lambda: dist.all_reduce(x),
        lambda: dist.broadcast(x, 0),
        lambda: dist.reduce(x, 0),
        lambda: dist.all_reduce(x, async_op=True).wait(),
        lambda: dist.all_reduce(x, op=dist.ReduceOp.AVG),
    ):
        assert peak_of(run) == (0, 0)


def test_collectives_into_one_tensor_allocate_nothing():
    whole, part = tensor(WORLD), tensor()
    assert peak_of(lambda: dist.all_gather_into_tensor(whole, part)) == (0, 0)
    assert peak_of(lambda: dist.reduce_scatter_tensor(part, whole)) == (0, 0)
    assert peak_of(lambda: dist.all_to_all_single(tensor(WORLD), whole)) == (0, WORLD * MIB)  # its output here


def test_collectives_of_lists_need_a_flat_buffer():
    parts, whole = [tensor() for _ in range(WORLD)], tensor()
    # newLikeFlat: one tensor for all parts
    assert peak_of(lambda: dist.all_gather(parts, whole)) == (0, WORLD * MIB)
    assert peak_of(lambda: dist.reduce_scatter(whole, parts)) == (0, WORLD * MIB)


def test_lists_of_different_sizes_are_sent_one_by_one():
    parts, own = [tensor(1 + rank) for rank in range(WORLD)], tensor(4)
    assert peak_of(lambda: dist.all_gather(parts, own)) == (0, 0)


def test_gather_scatter_and_messages_allocate_nothing():
    x = tensor()
    parts = [tensor() for _ in range(WORLD)]
    assert peak_of(lambda: dist.gather(x, parts, dst=3)) == (0, 0)
    assert peak_of(lambda: dist.gather(x, dst=0)) == (0, 0)
    assert peak_of(lambda: dist.scatter(x, parts, src=3)) == (0, 0)
    assert peak_of(lambda: dist.scatter(x, src=0)) == (0, 0)
    assert peak_of(lambda: dist.all_to_all(parts, [tensor() for _ in range(WORLD)])) == (0, WORLD * MIB)
    assert peak_of(lambda: dist.send(x, 0)) == (0, 0)
    assert peak_of(lambda: dist.recv(x, 0)) == (0, 0)
    assert peak_of(lambda: dist.isend(x, 0).wait()) == (0, 0)
    ring = [dist.P2POp(dist.isend, x, 4), dist.P2POp(dist.irecv, parts[0], 2)]
    assert peak_of(lambda: [work.wait() for work in dist.batch_isend_irecv(ring)]) == (0, 0)


@pytest.mark.filterwarnings("ignore:barrier")
def test_a_barrier_needs_two_blocks():
    # torch 2.11 keeps the first one until the next barrier.
    dist.barrier()
    # A byte that chooses the device, and the number that is summed; 512 bytes each.
    assert peak_of(dist.barrier) == (0, 512 if torch.__version__.startswith("2.11") else 1024)


def test_an_asynchronous_collective_keeps_its_input_until_it_is_waited_for():
    whole = tensor(WORLD)
    before = allocated()
    work = dist.all_gather_into_tensor(whole, tensor(), async_op=True)
    assert allocated() - before == MIB
    work.wait()
    assert allocated() == before


def test_a_synchronous_collective_keeps_nothing():
    whole = tensor(WORLD)
    before = allocated()
    dist.all_gather_into_tensor(whole, tensor())
    assert allocated() == before


def test_a_flat_buffer_lives_until_the_work_is_dropped():
    parts = [tensor() for _ in range(WORLD)]
    before = allocated()
    work = dist.all_gather(parts, tensor(), async_op=True)
    assert allocated() - before == (WORLD + 1) * MIB
    work.wait()
    assert allocated() - before == WORLD * MIB
    del work
    assert allocated() == before


def test_a_work_that_nobody_waits_for_ends_with_its_output():
    before = allocated()
    dist.all_gather_into_tensor(tensor(WORLD), tensor(), async_op=True)
    assert allocated() == before


def test_a_future_holds_the_output():
    x = tensor()
    future = dist.all_reduce(x, async_op=True).get_future().then(lambda done: done.value()[0].div_(WORLD))
    assert future.wait() is x


def test_a_coalesced_group_of_collectives_runs():
    tensors = [tensor() for _ in range(3)]
    with dist._coalescing_manager():
        for x in tensors:
            dist.all_reduce(x)
    assert all(x.is_cuda for x in tensors)


def test_tensors_of_the_cpu_are_refused_by_nccl_as_on_a_gpu():
    with pytest.raises(RuntimeError, match="No backend type associated with device type cpu"):
        dist.all_reduce(torch.ones(3))


def test_what_comes_from_any_rank_names_one():
    x = tensor()
    assert peak_of(lambda: dist.recv(x)) == (0, 0)
    assert dist.recv(x) == 0


def test_experts_get_equal_numbers_of_tokens():
    # 4 000 tokens, too many for known values, choose 2 of 16 experts: 8 000 / 16 = 500 for an expert, 2 on a rank.
    chosen = torch.rand(4000, 16, device="cuda").topk(2).indices.flatten()
    counts = torch.bincount(chosen, minlength=16)
    sends = counts.view(WORLD, 2).sum(1)
    receives = torch.empty_like(sends)
    dist.all_to_all_single(receives, sends)
    assert sends.tolist() == receives.tolist() == [1000] * WORLD
    received = torch.empty(sum(receives.tolist()), 64, device="cuda")
    added = peak_of(
        lambda: dist.all_to_all_single(received, torch.ones(8000, 64, device="cuda"), receives.tolist(), sends.tolist())
    )
    assert added == (0, 8000 * 64 * 4)
