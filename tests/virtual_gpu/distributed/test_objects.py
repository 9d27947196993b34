"""Collectives of Python objects in a virtual group."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist

import memexplore as mx
from memexplore.virtual_gpu.distributed import messages, objects

WORLD = 4


@pytest.fixture(autouse=True)
def group() -> Iterator[None]:
    with mx.virtual("T4"):
        dist.init_process_group("nccl", rank=1, world_size=WORLD)
        yield


def peak_of(run: Any) -> int:
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    run()
    assert torch.cuda.memory_allocated() == before
    return torch.cuda.max_memory_allocated() - before


def test_every_rank_has_the_object_of_this_rank():
    found: list[Any] = [None] * WORLD
    dist.all_gather_object(found, {"loss": [1.5, 2]})
    assert found == [{"loss": [1.5, 2]}] * WORLD
    assert found[0] is not found[1]


def test_the_bytes_of_all_ranks_are_gathered_twice():
    data = bytes(10**6)
    # This rank's bytes (and some of pickle), those of four ranks, and the flat buffer of four; each a block
    sizes = peak_of(lambda: dist.all_gather_object([None] * WORLD, data))
    assert 9 * 10**6 < sizes < 9 * 10**6 + 3 * 2**20


SMALL = {
    # 512 for each tensor: the object, its size, the sizes of all ranks, all objects, and the flat buffer of the second
    # all_gather (`all_gather_object` of torch/distributed/distributed_c10d.py holds the sizes until the end).
    "all_gather": (lambda: dist.all_gather_object([None] * WORLD, 7), 5 * 512),
    # The object, its size, the sizes of all ranks, all objects
    "gather": (lambda: dist.gather_object(7, [None] * WORLD, dst=1), 4 * 512),
    # The sizes and the objects; the temporary sum of the sizes is gone before
    "received by broadcast": (lambda: dist.broadcast_object_list([7, 8], src=0), 2 * 512),
    "received by recv": (lambda: dist.recv_object_list([7, 8], src=0), 2 * 512),
    # The largest size, the object, its size
    "received by scatter": (lambda: dist.scatter_object_list([7], None, src=0), 3 * 512),
    # Two objects, their two sizes, both as one tensor each
    "sent by broadcast": (lambda: dist.broadcast_object_list([7, 8], src=1), 6 * 512),
    # Four objects and their sizes, the own object, its size
    "sent by scatter": (lambda: dist.scatter_object_list([None], [5, 6, 7, 8], src=1), 10 * 512),
}


@pytest.mark.parametrize("case", SMALL)
def test_small_objects_take_a_block_for_each_tensor_of_torch(case):
    collective, expected = SMALL[case]
    assert peak_of(collective) == expected


def test_a_rank_that_scatters_nothing_is_told_so():
    with pytest.raises(ValueError, match="must provide non-None scatter_object_input_list"):
        dist.scatter_object_list([None], None, src=1)


def test_the_gathering_rank_alone_gets_the_objects():
    found: list[Any] = [None] * WORLD
    dist.gather_object("mine", found, dst=1)
    assert found == ["mine"] * WORLD
    dist.gather_object("mine", dst=0)


def test_the_sender_keeps_its_objects():
    objects = [1, {"a": 2}]
    dist.broadcast_object_list(objects, src=1)
    assert objects == [1, {"a": 2}]
    output = [None]
    dist.scatter_object_list(output, ["r0", "r1", "r2", "r3"], src=1)
    assert output == ["r1"]
    dist.send_object_list([1, 2], dst=0)


@pytest.mark.parametrize(
    "receive",
    [
        lambda own: dist.broadcast_object_list(own, src=0),
        lambda own: dist.scatter_object_list(own, None, src=0),
        lambda own: dist.recv_object_list(own, src=0),
    ],
)
def test_what_another_rank_sends_is_noted_as_not_known(receive):
    from memexplore.virtual_gpu.values import notes

    own = ["own"]
    receive(own)
    assert own == ["own"]
    assert any("the objects of rank 0 are not known" in note for note in notes.notes_of_run())


def test_none_in_the_place_of_an_object_is_what_the_other_rank_sends():
    with messages.between_ranks(lambda rank: []):
        for found in ("first", "second"):
            messages.send([found, 7], 0, objects._group_name("broadcast", None))
        messages.send(["r0", "r1", "r2", "r3"], 0, objects._group_name("scatter", None))
        messages._numbers.clear()
        own, placeholder, part = ["own", 7], [None, None], [None]
        dist.broadcast_object_list(own, src=0)
        dist.broadcast_object_list(placeholder, src=0)
        dist.scatter_object_list(part, None, src=0)
    assert (own, placeholder, part) == (["own", 7], ["second", 7], ["r1"])


def test_a_subgroup_has_its_own_numbers():
    pair = dist.new_group([1, 3])
    found: list[Any] = [None, None]
    dist.all_gather_object(found, 7, group=pair)
    assert found == [7, 7]
    dist.gather_object(8, found, dst=1, group=pair)
    assert found == [8, 8]
