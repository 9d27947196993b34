"""The allocator model against docs/allocator.md: segments, splits, search, release, limits."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from memexplore.allocator import Allocator, OutOfMemory, Settings
from memexplore.tape import Action

KIB = 1024
MIB = 1024**2
GIB = 1024**3


def allocator(text: str = "", *, capacity: int = 8 * GIB, total: int | None = None, **others: Any) -> Allocator:
    return Allocator(Settings.parse(text), capacity=capacity, total=total or capacity, **others)


class Events(list[tuple[str, int]]):
    """Name and size of every event."""

    def __call__(self, action: Action, address: int, size: int, stream: int) -> None:
        self.append((action.name.lower(), size))


def addresses_from(addresses: list[int]) -> Callable[[int, int], int]:
    return lambda size, stream: addresses.pop(0)


# ---- segments, splits, best fit
@pytest.mark.parametrize(
    ("size", "segment"),
    [
        (1, 2 * MIB),
        (MIB, 2 * MIB),
        (MIB + 1, 20 * MIB),
        (10 * MIB - 512, 20 * MIB),
        (10 * MIB, 10 * MIB),
        (11 * MIB + 1, 12 * MIB),
    ],
)
def test_the_segment_of_a_first_request(size: int, segment: int) -> None:
    model = allocator()
    model.malloc(size)
    assert model.reserved == segment


def test_small_requests_fill_a_segment_from_its_start() -> None:
    model = allocator()
    first = model.malloc(100)
    assert [model.malloc(100) - first, model.malloc(600) - first, model.malloc(1) - first] == [512, 1024, 2048]
    assert model.reserved == 2 * MIB


def test_a_large_block_keeps_a_remainder_of_up_to_a_mebibyte() -> None:
    model = allocator()
    address = model.malloc(11 * MIB + 1)
    # The segment has 12 MiB; 1 MiB - 512 would remain, which is not more than 1 MiB.
    assert model.block_size(address) == 12 * MIB
    assert model.allocated == 12 * MIB
    assert model.requested == 11 * MIB + 1


@pytest.mark.parametrize(("size", "expected"), [(19 * MIB, 20 * MIB), (19 * MIB - 512, 19 * MIB - 512)])
def test_a_split_needs_strictly_more_than_a_mebibyte(size: int, expected: int) -> None:
    model = allocator()
    model.free(model.malloc(20 * MIB))
    assert model.block_size(model.malloc(size)) == expected


def test_the_smallest_free_block_that_suffices_is_taken() -> None:
    model = allocator()
    addresses = {size: model.malloc(size * MIB) for size in (40, 24, 32)}
    for address in addresses.values():
        model.free(address)
    assert model.malloc(23 * MIB) == addresses[24]


@pytest.mark.parametrize(
    ("release", "takes_second"),
    [
        ("2.11", True),  # the lower address
        ("2.12.1", False),  # the block that was created first
        ("2.13", False),  # the older segment
    ],
)
def test_the_tie_between_segments(release: str, takes_second: bool) -> None:
    model = allocator(release=release, choose_address=addresses_from([1 << 30, 1 << 29]))
    first, second = model.malloc(20 * MIB), model.malloc(20 * MIB)
    model.free(first)
    model.free(second)
    assert (model.malloc(20 * MIB) == second) is takes_second


@pytest.mark.parametrize(("release", "takes_lower"), [("2.11", True), ("2.12", False), ("2.13", True)])
def test_the_tie_within_a_segment(release: str, takes_lower: bool) -> None:
    model = allocator(release=release)
    low, middle, high, _ = (model.malloc(512) for _ in range(4))
    for address in (low, middle, high):
        model.free(address)
    # One free block of 1536 bytes is split twice: its fronts are new blocks, its remainder is the old one.
    assert [model.malloc(512) for _ in range(3)] == [low, middle, high]
    model.free(low)
    model.free(high)
    assert (model.malloc(512) == low) is takes_lower


def test_streams_do_not_share_free_blocks() -> None:
    model = allocator()
    model.free(model.malloc(512, stream=0))
    model.malloc(512, stream=7)
    assert model.reserved == 2 * 2 * MIB


def test_freed_neighbours_merge() -> None:
    model = allocator()
    first, second, third = (model.malloc(512) for _ in range(3))
    model.free(first)
    model.free(third)
    model.free(second)
    [segment] = model.snapshot()
    assert [(block["size"], block["state"]) for block in segment["blocks"]] == [(2 * MIB, "inactive")]


# ---- release, limits, out of memory
def test_release_takes_large_before_small_and_by_size() -> None:
    events = Events()
    model = allocator(on_event=events)
    for address in [model.malloc(size) for size in (512, 40 * MIB, 24 * MIB)]:
        model.free(address)
    events.clear()
    model.empty_cache()
    assert events == [("segment_free", 24 * MIB), ("segment_free", 40 * MIB), ("segment_free", 2 * MIB)]


def test_a_segment_with_a_live_block_is_not_released() -> None:
    model = allocator()
    first, _ = model.malloc(512), model.malloc(512)
    model.free(first)
    model.empty_cache()
    assert model.reserved == 2 * MIB


def test_a_failed_request_releases_the_cache_and_retries() -> None:
    events = Events()
    model = allocator(capacity=60 * MIB, on_event=events)
    model.free(model.malloc(40 * MIB))
    model.malloc(50 * MIB)
    assert events[1:] == [("segment_free", 40 * MIB), ("segment_alloc", 50 * MIB)]
    assert model.stats()["num_alloc_retries"] == 1


def test_the_message_of_an_out_of_memory_error() -> None:
    events = Events()
    model = allocator(capacity=100 * MIB, total=150 * MIB, on_event=events, release="2.13")
    model.malloc(70 * MIB)
    model.malloc(MIB + 1)
    with pytest.raises(OutOfMemory) as caught:
        model.malloc(21 * MIB - 5)
    # Reserved are 70 + 20 MiB, so 10 MiB are free; 150 - 10 MiB are in use. Allocated are 71 MiB + 512 bytes.
    assert str(caught.value) == (
        "CUDA out of memory. Tried to allocate 22.00 MiB. GPU 0 has a total capacity of 150.00 MiB of which "
        "10.00 MiB is free. Including non-PyTorch memory, this process has 140.00 MiB memory in use. Of the "
        "allocated memory 71.00 MiB is allocated by PyTorch, and 19.00 MiB is reserved by PyTorch but unallocated. "
        "If reserved but unallocated memory is large try setting PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True "
        "to avoid fragmentation.  See documentation for Memory Management  "
        "(https://docs.pytorch.org/docs/stable/notes/cuda.html#optimizing-memory-usage-with-pytorch-cuda-alloc-conf)"
    )
    assert caught.value.size == 21 * MIB
    assert events[-1] == ("oom", 21 * MIB)
    assert model.stats()["num_ooms"] == 1


def test_a_three_mebibyte_request_fails_with_its_segment() -> None:
    with pytest.raises(OutOfMemory, match=r"Tried to allocate 20\.00 MiB"):
        allocator(capacity=10 * MIB).malloc(3 * MIB)


def test_the_message_names_the_memory_fraction() -> None:
    model = allocator(capacity=100 * MIB)
    model.set_memory_fraction(0.5)
    model.malloc(40 * MIB)
    with pytest.raises(OutOfMemory, match=r"memory in use\. 50\.00 MiB allowed; Of the allocated"):
        model.malloc(20 * MIB)
    model.set_memory_fraction(1.0)
    model.malloc(20 * MIB)


def test_a_refusal_before_cudamalloc() -> None:
    model = allocator("throw_on_cudamalloc_oom:True,per_process_memory_fraction:0.9999", capacity=20 * MIB)
    model.set_memory_fraction(1.0)
    with pytest.raises(OutOfMemory, match=r"preemptively rejected .* Requested size: 19\.50 MiB"):
        model.malloc(19 * MIB + 512 * KIB)
    assert (model.stats()["num_oom_rejections"], model.stats()["num_ooms"]) == (1, 0)


def test_more_than_an_exabyte_is_refused_at_once() -> None:
    with pytest.raises(OutOfMemory, match="more than 1EB"):
        allocator().malloc(1 << 60)


def test_an_empty_request_allocates_nothing() -> None:
    model = allocator()
    assert model.malloc(0) == 0
    model.free(0)
    assert model.reserved == 0


def test_an_unknown_address_cannot_be_freed() -> None:
    with pytest.raises(ValueError, match="invalid device pointer"):
        allocator().free(4096)


# ---- settings that change search and release
def test_a_block_beyond_max_split_size_is_not_split_for_a_small_request() -> None:
    model = allocator("max_split_size_mb:20")
    model.free(model.malloc(30 * MIB))
    model.malloc(12 * MIB)
    assert model.reserved == 30 * MIB + 12 * MIB


@pytest.mark.parametrize(("size", "reserved"), [(31, 50), (30, 50 + 30)])
def test_an_oversize_block_serves_requests_within_the_rounding(size: int, reserved: int) -> None:
    # 50 MiB serve 31 MiB, because 50 < 31 + 20; they do not serve 30 MiB, because 50 >= 30 + 20.
    model = allocator("max_split_size_mb:20")
    model.free(model.malloc(50 * MIB))
    address = model.malloc(size * MIB)
    assert model.reserved == reserved * MIB
    assert model.block_size(address) == (50 if reserved == 50 else 30) * MIB


def test_oversize_blocks_are_counted() -> None:
    model = allocator("max_split_size_mb:20")
    model.free(model.malloc(50 * MIB))
    stats = model.stats()
    assert stats["max_split_size"] == 20 * MIB
    assert (stats["oversize_allocations.allocated"], stats["oversize_allocations.current"]) == (1, 0)
    assert stats["oversize_segments.current"] == 1


def test_only_as_many_oversize_blocks_as_needed_are_released() -> None:
    events = Events()
    model = allocator("max_split_size_mb:20", capacity=150 * MIB, on_event=events)
    for address in [model.malloc(size * MIB) for size in (30, 40, 50)]:
        model.free(address)
    events.clear()
    # 120 MiB of 150 are reserved; for 75 MiB the largest are released until 75 are reached: 50 + 40.
    model.malloc(75 * MIB)
    assert events == [("segment_free", 50 * MIB), ("segment_free", 40 * MIB), ("segment_alloc", 76 * MIB)]
    assert model.stats()["num_alloc_retries"] == 0


def test_one_oversize_block_is_released_if_it_is_enough() -> None:
    events = Events()
    model = allocator("max_split_size_mb:20", capacity=150 * MIB, on_event=events)
    for address in [model.malloc(size * MIB) for size in (30, 40, 70)]:
        model.free(address)
    events.clear()
    # 70 MiB >= 45 + 20, so the block does not serve, but releasing it alone makes room.
    model.malloc(45 * MIB)
    assert events == [("segment_free", 70 * MIB), ("segment_alloc", 46 * MIB)]


def test_garbage_collection_releases_old_blocks() -> None:
    events = Events()
    text = "garbage_collection_threshold:0.5,per_process_memory_fraction:0.8"
    model = allocator(text, capacity=200 * MIB, on_event=events)
    for address in [model.malloc(size * MIB) for size in (30, 40)]:
        model.free(address)
    model.free(model.malloc(40 * MIB))
    events.clear()
    # The limit is 160 MiB and half of it 80: with 70 reserved nothing is collected, with 70 + 42 the target is 32.
    # The search for 44 MiB is the fifth. The block of 30 MiB is free since the second, so its age is 3, that of 40 MiB
    # since the third: 2. The average is 2.5, so only the first goes; 30 are less than 32, and the average is now 2.
    model.malloc(42 * MIB)
    model.malloc(44 * MIB)
    assert events == [
        ("segment_alloc", 42 * MIB),
        ("segment_free", 30 * MIB),
        ("segment_free", 40 * MIB),
        ("segment_alloc", 44 * MIB),
    ]


def test_large_segments_of_another_size() -> None:
    model = allocator("large_segment_size_mb:32")
    model.malloc(2 * MIB)
    assert model.reserved == 32 * MIB


# ---- settings that change while there are blocks
def test_blocks_from_before_expandable_segments_stay_and_are_reused() -> None:
    device = allocator()
    device.free(device.malloc(30 * MIB))
    device.change_settings(Settings.parse("expandable_segments:True"))
    device.malloc(29 * MIB)  # from the segment of 30 MiB, split by the rule of expandable segments: 512 bytes suffice
    assert (device.reserved, device.allocated) == (30 * MIB, 29 * MIB)
    device.malloc(30 * MIB)  # mapped in pages of 20 MiB
    assert device.reserved == 70 * MIB


def test_expandable_segments_that_are_off_again_serve_no_request() -> None:
    device = allocator("expandable_segments:True")
    device.free(device.malloc(20 * MIB))
    device.change_settings(Settings())
    first = device.malloc(20 * MIB)
    assert device.reserved == 40 * MIB
    device.free(first)
    device.malloc(19 * MIB + 512)  # less than 1 MiB would remain: the whole block, as without expandable segments
    assert (device.reserved, device.allocated) == (40 * MIB, 20 * MIB)
    device.change_settings(Settings.parse("expandable_segments:True"))
    device.malloc(20 * MIB)
    assert device.reserved == 40 * MIB


def test_a_change_of_settings_keeps_the_limit_of_memory() -> None:
    device = allocator("per_process_memory_fraction:0.5", capacity=100 * MIB)
    device.change_settings(Settings.parse("roundup_power2_divisions:4,max_split_size_mb:20"))
    assert device.limit == 50 * MIB  # read when PyTorch makes the allocator
    device.malloc(5 * MIB + 1)  # 4 to 8 MiB in four parts: 5, 6
    assert (device.allocated, device.stats()["max_split_size"]) == (6 * MIB, 20 * MIB)
