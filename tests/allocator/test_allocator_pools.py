"""Expandable segments, `record_stream` and private pools."""

from __future__ import annotations

from typing import Any

import pytest

from memexplore.allocator import Allocator, OutOfMemory, PoolOptions, Settings
from memexplore.tape import Action

MIB = 1024**2
GIB = 1024**3


def allocator(text: str = "", *, capacity: int = 8 * GIB, **others: Any) -> Allocator:
    return Allocator(Settings.parse(text), capacity=capacity, total=capacity, **others)


class Events(list[tuple[str, int]]):
    """Name and size of every event."""

    def __call__(self, action: Action, address: int, size: int, stream: int) -> None:
        self.append((action.name.lower(), size))


# ---- expandable segments
def test_an_expandable_segment_grows_by_pages_without_a_gap() -> None:
    events = Events()
    model = allocator("expandable_segments:True", on_event=events)
    first = model.malloc(15 * MIB)
    second = model.malloc(15 * MIB)
    assert second - first == 15 * MIB
    # 15 MiB need one page of 20; 5 of it are left, 10 more need one more page.
    assert events == [("segment_map", 20 * MIB), ("segment_map", 20 * MIB)]
    assert model.stats()["segment.all.current"] == 0
    assert model.stats()["num_device_alloc"] == 2


def test_expandable_small_pages_have_2_mebibytes() -> None:
    model = allocator("expandable_segments:True")
    model.malloc(512)
    assert model.reserved == 2 * MIB


def test_expandable_blocks_have_no_remainder() -> None:
    model = allocator("expandable_segments:True")
    assert model.block_size(model.malloc(19 * MIB + 1)) == 19 * MIB + 512


def test_whole_pages_inside_a_free_block_are_unmapped() -> None:
    events = Events()
    model = allocator("expandable_segments:True", on_event=events)
    first, middle, last = (model.malloc(size * MIB) for size in (15, 50, 15))
    model.free(middle)
    events.clear()
    model.empty_cache()
    # 15 to 65 MiB are free; the whole pages of 20 MiB inside are 20 to 60.
    assert events == [("segment_unmap", 40 * MIB)]
    sizes = [[block["size"] // MIB for block in segment["blocks"]] for segment in model.snapshot()]
    assert sizes == [[15, 5], [5, 15]]
    assert last - first == 65 * MIB


def test_unmapped_pages_are_mapped_again() -> None:
    model = allocator("expandable_segments:True")
    first, middle, _ = (model.malloc(size * MIB) for size in (15, 50, 15))
    model.free(middle)
    model.empty_cache()
    assert model.malloc(45 * MIB) - first == 15 * MIB


def test_memory_mapped_before_a_failure_stays_mapped() -> None:
    events = Events()
    model = allocator("expandable_segments:True", capacity=100 * MIB, on_event=events)
    addresses = [model.malloc(20 * MIB) for _ in range(4)]
    model.free(addresses[1])
    model.empty_cache()
    events.clear()
    # Free address space: the page at 20 MiB, then everything from 80 MiB on. 80 MiB more do not fit into 100.
    with pytest.raises(OutOfMemory):
        model.malloc(80 * MIB)
    assert [name for name, _ in events] == ["oom"]
    assert model.reserved == 60 * MIB


def test_expandable_free_blocks_do_not_count_as_inactive_splits() -> None:
    model = allocator("expandable_segments:True")
    model.malloc(512)
    assert model.stats()["inactive_split.all.current"] == 0


# ---- other streams, private pools
def test_a_block_used_on_another_stream_is_free_when_that_stream_has_finished() -> None:
    done: set[int] = set()
    model = allocator(finished=done.__contains__)
    address = model.malloc(30 * MIB)
    model.record_stream(address, 7)
    model.free(address)
    assert (model.allocated, model.active, model.requested) == (0, 30 * MIB, 30 * MIB)
    assert model.malloc(30 * MIB) != address
    done.add(7)
    assert model.malloc(30 * MIB) == address
    assert model.active == 60 * MIB


def test_a_block_used_on_its_own_stream_is_free_at_once() -> None:
    model = allocator(finished=lambda stream: False)
    address = model.malloc(512, stream=3)
    model.record_stream(address, 3)
    model.free(address)
    assert model.active == 0


def test_a_failed_request_waits_for_other_streams() -> None:
    model = allocator(capacity=60 * MIB, finished=lambda stream: False)
    address = model.malloc(40 * MIB)
    model.record_stream(address, 7)
    model.free(address)
    model.malloc(40 * MIB)
    assert model.stats()["num_sync_all_streams"] == 1
    assert model.reserved == 40 * MIB


def test_a_private_pool_does_not_share_its_blocks() -> None:
    model = allocator()
    model.blocks.begin_pool((0, 1))
    model.free(model.malloc(512))
    model.blocks.end_pool((0, 1))
    model.malloc(512)
    assert model.reserved == 2 * 2 * MIB
    model.blocks.begin_pool((0, 1))
    model.malloc(512)
    assert model.reserved == 2 * 2 * MIB
    assert model.stats()["reserved_bytes_by_private_pools.0_1.all.current"] == 2 * MIB


def test_the_most_recent_pool_is_used() -> None:
    model = allocator()
    model.blocks.begin_pool((0, 1))
    model.blocks.begin_pool((0, 2))
    model.malloc(512)
    assert [segment["segment_pool_id"] for segment in model.snapshot()] == [(0, 2)]


def test_a_private_pool_is_released_at_use_count_zero() -> None:
    model = allocator()
    model.blocks.begin_pool((0, 1))
    model.free(model.malloc(512))
    model.blocks.end_pool((0, 1))
    model.empty_cache()
    assert model.reserved == 2 * MIB
    model.blocks.release_pool((0, 1))
    model.empty_cache()
    assert model.reserved == 0


def test_an_on_oom_pool_serves_a_failed_request() -> None:
    model = allocator(capacity=40 * MIB)
    model.blocks.create_pool((0, 1), PoolOptions.ON_OOM)
    model.blocks.begin_pool((0, 1))
    spare = model.malloc(30 * MIB)
    model.free(spare)
    model.blocks.end_pool((0, 1))
    assert model.malloc(30 * MIB) == spare


def test_a_pool_without_splits_hands_out_whole_blocks() -> None:
    model = allocator()
    model.blocks.create_pool((0, 1), PoolOptions.NO_SPLIT)
    model.blocks.begin_pool((0, 1))
    assert model.block_size(model.malloc(512)) == 2 * MIB
