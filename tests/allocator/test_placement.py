"""Where segments go: the rules of each driver, by hand, and what must hold for every sequence of segments."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from memexplore.allocator import Allocator, Settings
from memexplore.allocator.placement import END, Downwards, FirstFit, LinuxPlacement, Placement, placement_on, system_of
from memexplore.tape import Os

MIB = 1024**2
PLACEMENTS = {
    "linux": LinuxPlacement,
    "first fit": lambda: FirstFit(0),
    "downwards": Downwards,
}


def below_end(address: int | None) -> int:
    """MiB from an address up to the end of the addresses."""
    assert address is not None
    return (END - address) // MIB


def placed(placement: Placement, *sizes: int) -> list[int]:
    """Addresses of new segments of some MiB, as MiB below the end."""
    return [below_end(placement.place(size * MIB)) for size in sizes]


def test_ranges_on_linux_are_multiples_of_32_mib_one_below_the_other():
    # 20 MiB take a range of 32; 100 take one of 128; 512 are 16 · 32 already: 32, 32 + 128, 32 + 128 + 512
    assert placed(LinuxPlacement(), 20, 100, 512) == [32, 160, 672]


def test_a_segment_that_fits_into_the_rest_of_a_range_follows_the_one_before_it():
    # the range of 100 MiB ends 28 MiB behind it: 26 begin at 128 - 100 = 28 below the end, 2 at 28 - 26 = 2
    assert placed(LinuxPlacement(), 100, 26, 2) == [128, 28, 2]


def test_the_range_that_was_reserved_last_comes_first():
    # ranges at 64 and 128 below the end, each with 24 MiB behind its 40: 128 - 40 = 88, then 64 - 40 = 24
    assert placed(LinuxPlacement(), 40, 40, 20, 20) == [64, 128, 88, 24]


def test_a_range_without_a_segment_is_used_again_from_its_end():
    placement = LinuxPlacement()
    high, _ = (placement.place(100 * MIB) for _ in range(2))
    assert high is not None
    placement.release(high)
    # the highest gap is the one of 128 MiB at the end: 50 MiB take 64 of it, the next 50 the other 64
    assert placed(placement, 50, 50) == [64, 128]


def test_a_range_with_a_segment_keeps_its_addresses():
    placement = LinuxPlacement()
    first = placement.place(20 * MIB)
    assert first is not None
    placement.place(2 * MIB)
    placement.release(first)
    # 20 MiB fit into the hole of the first segment, 30 do not and take a range of their own at 32 + 32
    assert placed(placement, 20, 30) == [32, 64]


def test_wsl_uses_the_lowest_free_addresses():
    placement = placement_on(Os.WSL)
    addresses = [placement.place(size * MIB) for size in (20, 2, 30)]
    placement.release(addresses[0])  # type: ignore[arg-type]
    # 26 MiB do not fit into the hole of 20, so they follow the last segment at 20 + 2 + 30; 12 fit
    assert [placement.place(size * MIB) - 0x502000000 for size in (26, 12)] == [52 * MIB, 0]  # type: ignore[operator]


@pytest.mark.parametrize("make", PLACEMENTS.values(), ids=PLACEMENTS)
@given(st.lists(st.tuples(st.integers(1, 200), st.booleans(), st.integers(0, 100)), max_size=60))
def test_segments_never_overlap_and_begin_at_pages(make, steps):
    placement = make()
    live: dict[int, int] = {}
    for pages, frees, which in steps:
        size = pages * 2 * MIB
        address = placement.place(size)
        assert address % (2 * MIB) == 0
        assert address + size <= END
        assert all(address + size <= start or start + other <= address for start, other in live.items())
        live[address] = size
        if frees:
            freed = list(live)[which % len(live)]
            del live[freed]
            placement.release(freed)


@pytest.mark.parametrize("make", [LinuxPlacement, lambda: FirstFit(0)], ids=["linux", "first fit"])
@given(st.lists(st.integers(1, 100), max_size=30), st.randoms(use_true_random=False))
def test_after_all_segments_are_released_all_is_as_at_the_start(make, pages, random):
    placement, new = make(), make()
    addresses = [placement.place(count * 2 * MIB) for count in pages]
    random.shuffle(addresses)
    for address in addresses:
        placement.release(address)
    assert [placement.place(count * 2 * MIB) for count in pages] == [new.place(count * 2 * MIB) for count in pages]


def test_a_request_larger_than_all_addresses_has_none():
    assert [make().place(2 * END) for make in PLACEMENTS.values()] == [None] * 3


def test_an_unknown_address_is_not_released():
    placement = LinuxPlacement()
    placement.release(0)
    assert placed(placement, 20) == [32]


def test_an_allocator_without_addresses_left_continues_behind_the_end():
    model = Allocator(capacity=None, total=None)
    assert [model.malloc(END), model.malloc(2 * END)] == [0, END]


def test_a_released_segment_gives_its_addresses_back():
    model = Allocator(Settings(), capacity=None, total=None)
    first = model.malloc(50 * MIB)
    model.free(first)
    model.empty_cache()
    assert model.malloc(60 * MIB) == first  # both take 64 MiB at the end


def test_another_operating_system_is_refused_in_one_sentence():
    with pytest.raises(
        ValueError, match="'macos' is not an operating system of a GPU driver; write linux, wsl, windows"
    ):
        system_of("macos")
