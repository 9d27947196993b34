"""The smallest capacity with which the requests of a tape go through."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from memexplore.allocator import Settings
from memexplore.allocator.replay import trial
from memexplore.allocator.smallest import Need, smallest_capacity
from memexplore.tape import Action, Meta, Source, Tape

MIB = 1 << 20
PAGE = 2 * MIB
META = Meta(Source.PREDICTED, "Tesla T4")


def tape_of(*steps: int) -> Tape:
    """Return a tape that requests so many MiB, or where negative frees the block of that request, counted from 1."""
    rows: list[tuple[Action, int, int]] = []
    sizes: list[int] = []
    for step in steps:
        if step > 0:
            sizes.append(step * MIB)
            rows.append((Action.ALLOC, len(sizes), step * MIB))
        else:
            rows += [(action, -step, sizes[-step - 1]) for action in (Action.FREE_REQUESTED, Action.FREE_COMPLETED)]
    action, address, size = zip(*rows, strict=True)
    return Tape.from_columns({"action": action, "address": address, "size": size}, meta=META)


def test_cached_segments_are_given_back_before_a_request_fails() -> None:
    # 12 MiB are cached when 20 are requested: 32 reserved with room, and 20 suffice if the 12 are given back.
    assert smallest_capacity(tape_of(12, -1, 20)) == Need(20 * MIB, 32 * MIB, retries=1)


def test_a_block_that_is_left_keeps_its_segment() -> None:
    # Five blocks of 4 MiB in a segment of 20, of which one is left; 24 more need a segment of their own.
    pinned = tape_of(4, 4, 4, 4, 4, -2, -3, -4, -5, 24)
    assert smallest_capacity(pinned) == Need(44 * MIB, 44 * MIB, retries=0)
    # An expandable segment grows by 20 MiB: behind the first block 16 + 20 hold the 24.
    assert smallest_capacity(pinned, Settings(expandable_segments=True)).smallest == 40 * MIB


def test_a_failure_that_the_program_caught_needs_nothing() -> None:
    tape = tape_of(12, -1, 4)
    caught = tape.replace(action=np.where(tape.size == 4 * MIB, Action.OOM, tape.action))
    assert smallest_capacity(caught).smallest == 12 * MIB


def test_a_request_without_which_the_program_goes_on_needs_nothing() -> None:
    tape = tape_of(12, 30, -2, 14)
    assert smallest_capacity(tape).smallest == 42 * MIB
    # Without the 30 MiB the two others are left.
    assert smallest_capacity(tape, optional=tape.size == 30 * MIB).smallest == 26 * MIB


def test_an_empty_tape_needs_nothing() -> None:
    assert smallest_capacity(tape_of(1)[:0]) == Need(0, 0, retries=0)


def test_a_limit_of_the_settings_is_left_out() -> None:
    limited = Settings.parse("per_process_memory_fraction:0.1")
    assert smallest_capacity(tape_of(12), limited).smallest == 12 * MIB


@st.composite
def programs(draw: st.DrawFn) -> Tape:
    """Requests of 1 to 40 MiB, and frees of some of them."""
    steps: list[int] = []
    live: list[int] = []
    count = 0
    for _ in range(draw(st.integers(1, 30))):
        if live and draw(st.booleans()):
            steps.append(-live.pop(draw(st.integers(0, len(live) - 1))))
        else:
            count += 1
            live.append(count)
            steps.append(draw(st.integers(1, 40)))
    return tape_of(*steps)


@given(programs(), st.sampled_from(["", "expandable_segments:True", "max_split_size_mb:24"]))
def test_it_suffices_and_a_page_less_does_not(tape: Tape, settings: str) -> None:
    parsed = Settings.parse(settings)
    need = smallest_capacity(tape, parsed)

    def suffices(capacity: int) -> bool:
        return trial(tape, parsed, capacity).rows == len(tape)

    assert suffices(need.smallest)
    assert not suffices(need.smallest - PAGE)
    assert suffices(need.without_pressure)
    assert trial(tape, parsed, None).reserved == need.without_pressure >= need.smallest
    assert trial(tape, parsed, need.smallest).retries == need.retries


@pytest.mark.parametrize("capacity", [20, 21, 22])
def test_a_capacity_between_pages_is_as_good_as_the_page_below(capacity: int) -> None:
    # Segments are multiples of 2 MiB.
    assert trial(tape_of(12, -1, 20), Settings(), capacity * MIB).retries == 1
