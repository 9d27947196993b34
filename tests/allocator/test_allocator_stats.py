"""The allocator's statistics, and invariants that random programs check after every step."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from memexplore.allocator import Allocator, OutOfMemory, Settings

MIB = 1024**2
GIB = 1024**3


def allocator(text: str = "", *, capacity: int = 8 * GIB, total: int | None = None, **others: Any) -> Allocator:
    return Allocator(Settings.parse(text), capacity=capacity, total=total or capacity, **others)


# ---- statistics
def test_the_statistics_have_the_names_of_torch() -> None:
    names = ["allocation", "segment", "active", "inactive_split"]
    names += ["allocated_bytes", "reserved_bytes", "active_bytes", "inactive_split_bytes", "requested_bytes"]
    values = ["current", "peak", "allocated", "freed"]
    expected = {
        f"{name}.{pool}.{value}" for name in names for pool in ("all", "large_pool", "small_pool") for value in values
    }
    expected |= {f"oversize_{name}.{value}" for name in ("allocations", "segments") for value in values}
    expected |= {"num_alloc_retries", "num_ooms", "num_sync_all_streams", "num_device_alloc", "num_device_free"}
    expected |= {"num_oom_rejections", "max_split_size"}
    assert set(allocator().stats()) == expected


def test_statistics_by_pool() -> None:
    model = allocator()
    small, large = model.malloc(1000), model.malloc(5 * MIB)
    model.free(small)
    stats = model.stats()
    assert stats["allocated_bytes.small_pool.current"] == 0
    assert stats["allocated_bytes.small_pool.peak"] == 1024
    assert stats["allocated_bytes.large_pool.current"] == 5 * MIB
    assert stats["allocated_bytes.all.allocated"] == 5 * MIB + 1024
    assert stats["allocated_bytes.all.freed"] == 1024
    assert stats["requested_bytes.all.peak"] == 5 * MIB + 1000
    assert stats["segment.all.current"] == 2
    # Of 20 MiB 15 are a free block beside a live one; the small segment is whole again.
    assert (stats["inactive_split.all.current"], stats["inactive_split_bytes.all.current"]) == (1, 15 * MIB)
    model.free(large)
    assert model.stats()["inactive_split_bytes.all.current"] == 0


def test_reset_peaks_equal_the_current_values() -> None:
    model = allocator()
    first, _ = model.malloc(30 * MIB), model.malloc(20 * MIB)
    model.free(first)
    model.reset_peak_stats()
    assert (model.peak_allocated, model.peak_active, model.peak_reserved) == (20 * MIB, 20 * MIB, 50 * MIB)
    model.reset_accumulated_stats()
    stats = model.stats()
    assert (stats["allocation.all.allocated"], stats["allocation.all.freed"]) == (0, 0)
    assert stats["allocation.all.current"] == 1


# ---- invariants under random programs
CONFIGURATIONS = [
    "",
    "expandable_segments:True",
    "max_split_size_mb:20",
    "max_split_size_mb:32,garbage_collection_threshold:0.6,per_process_memory_fraction:0.8",
    "garbage_collection_threshold:0.5,per_process_memory_fraction:0.9",
    "roundup_power2_divisions:4",
]
SIZES = st.one_of(st.integers(1, 5000), st.integers(1, 2 * MIB), st.integers(1, 60 * MIB))
STEPS = st.one_of(
    st.tuples(st.just("malloc"), SIZES, st.sampled_from([0, 7])),
    st.tuples(st.just("free"), st.integers(0, 1 << 20), st.just(0)),
    st.tuples(st.just("record"), st.integers(0, 1 << 20), st.sampled_from([0, 7, 9])),
    st.tuples(st.just("finish"), st.just(0), st.sampled_from([0, 7, 9])),
    st.tuples(st.sampled_from(["release", "reset peaks"]), st.just(0), st.just(0)),
)


@settings(max_examples=150)
@given(st.lists(STEPS, max_size=120), st.sampled_from(CONFIGURATIONS), st.sampled_from(["2.11", "2.12", "2.13"]))
def test_invariants(steps: list[tuple[str, int, int]], text: str, release: str) -> None:
    done: set[int] = set()
    model = allocator(text, capacity=200 * MIB, total=220 * MIB, release=release, finished=done.__contains__)
    live: list[int] = []
    for step, value, stream in steps:
        if step == "malloc":
            if value % 2:
                done.clear()
            try:
                live.append(model.malloc(value, stream))
            except OutOfMemory:
                # The only cached memory left shares a segment with a live block.
                assert all(len(segment["blocks"]) > 1 or segment["active_size"] for segment in model.snapshot())
        elif step == "free" and live:
            model.free(live.pop(value % len(live)))
        elif step == "record" and live:
            model.record_stream(live[value % len(live)], stream)
        elif step == "finish":
            done.add(stream)
        elif step == "release":
            model.empty_cache()
        elif step == "reset peaks":
            model.reset_peak_stats()
        check(model, live)
    for address in live:
        model.free(address)
    model.empty_cache()
    assert (model.reserved, model.active, model.requested) == (0, 0, 0)


def check(model: Allocator, live: list[int]) -> None:
    """Assert: no overlap, no two free neighbours, allocated <= active <= reserved, statistics equal to the blocks."""
    segments = model.snapshot()
    blocks = [block for segment in segments for block in segment["blocks"]]
    ends = [segment["address"] + segment["total_size"] for segment in segments]
    assert all(end <= after["address"] for end, after in zip(ends, segments[1:], strict=False))
    for segment in segments:
        position = segment["address"]
        for block in segment["blocks"]:
            assert block["address"] == position
            position += block["size"]
        assert position == segment["address"] + segment["total_size"]
        states = [block["state"] for block in segment["blocks"]]
        assert ("inactive", "inactive") not in pairwise(states)
    assert sorted(live) == [block["address"] for block in blocks if block["state"] == "active_allocated"]
    assert model.capacity >= model.reserved >= model.active >= model.allocated >= 0
    assert model.active >= model.requested
    assert model.peak_reserved >= model.peak_active >= model.peak_allocated
    stats = model.stats()
    allocated = [block["size"] for block in blocks if block["state"] == "active_allocated"]
    pending = [block["size"] for block in blocks if block["state"] == "active_pending_free"]
    splits = [
        block["size"]
        for segment in segments
        for block in segment["blocks"]
        if block["state"] == "inactive" and len(segment["blocks"]) > 1 and not segment["is_expandable"]
    ]
    assert (stats["allocation.all.current"], stats["allocated_bytes.all.current"]) == (len(allocated), sum(allocated))
    assert stats["active.all.current"] == len(allocated) + len(pending)
    assert stats["active_bytes.all.current"] == sum(allocated) + sum(pending)
    assert (stats["inactive_split.all.current"], stats["inactive_split_bytes.all.current"]) == (
        len(splits),
        sum(splits),
    )
    assert stats["reserved_bytes.all.current"] == sum(segment["total_size"] for segment in segments)
    for name in ("allocation", "active", "allocated_bytes", "active_bytes", "requested_bytes", "reserved_bytes"):
        for pool in ("all", "large_pool", "small_pool"):
            current = stats[f"{name}.{pool}.current"]
            assert current == stats[f"{name}.{pool}.allocated"] - stats[f"{name}.{pool}.freed"]
            assert current <= stats[f"{name}.{pool}.peak"]


def test_peaks_since_a_mark_leave_the_peaks_of_the_statistics_as_they_are():
    model = allocator()
    big = model.malloc(1024)
    model.free(big)
    model.mark_peaks()
    model.malloc(512)
    assert model.peaks_since_mark() == (512, 2 * 1024**2)  # one small segment
    assert model.stats()["allocated_bytes.all.peak"] == 1024


def test_a_reset_of_peaks_is_not_seen_by_the_peaks_since_a_mark():
    model = allocator()
    model.mark_peaks()
    model.free(model.malloc(1024))
    model.reset_peak_stats()
    assert model.stats()["allocated_bytes.all.peak"] == 0
    assert model.peaks_since_mark()[0] == 1024


def test_a_mark_after_a_reset_starts_at_the_current_value():
    model = allocator()
    model.malloc(512)
    model.free(model.malloc(1024))
    model.reset_peak_stats()
    model.mark_peaks()
    assert model.peaks_since_mark()[0] == 512
    assert model.peak_allocated == 512
