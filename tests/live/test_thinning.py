"""The thinned history of steps: bounded, and no peak is lost."""

from __future__ import annotations

from typing import NamedTuple

import pytest
from hypothesis import given
from hypothesis import strategies as st

from memexplore.live.thinning import History


class Row(NamedTuple):
    step: int
    peak: int
    other: int | None = None


def history(capacity: int = 8, recent: int = 4) -> History[Row]:
    return History(lambda row: (row.peak, row.other), lambda row: row.peak, lambda row: row.step, capacity, recent)


def filled(peaks: list[int], **sizes: int) -> History[Row]:
    kept = history(**sizes)
    for step, peak in enumerate(peaks, 1):
        kept.add(Row(step, peak))
    return kept


def test_few_steps_are_kept_exactly():
    kept = filled([5, 3, 9])
    assert [row.peak for row in kept.rows()] == [5, 3, 9]
    assert [(each.first, each.low[0], each.high[0]) for each in kept.bins()] == [(1, 5, 5), (2, 3, 3), (3, 9, 9)]


def test_a_bin_has_minimum_median_and_maximum():
    kept = filled([1, 2, 30, 4, 5, 6, 7, 8, 9, 10, 11], capacity=4)
    # 4 bins of 1 step become 2 of 2; with two more of 2 these are 4, which become 2 of 4: steps 1-4 and 5-8.
    first, second, *_ = kept.bins()
    assert (first.first, first.last, first.low[0], first.high[0]) == (1, 4, 1, 30)
    assert first.middle[0] == ((1 + 2) / 2 + (30 + 4) / 2) / 2
    assert (second.low[0], second.middle[0], second.high[0]) == (5, 6.5, 8)


def test_a_number_that_a_row_lacks_is_left_out():
    kept = history(capacity=2)
    for step, other in enumerate([None, 4, 8, None, None], 1):
        kept.add(Row(step, 1, other))
    assert [each.high[1] for each in kept.bins()] == [8, None]


def test_the_step_with_the_highest_peak_of_a_bin_stays_a_row():
    kept = filled([1, 2, 30, 4, 5, 6, 7, 8, 9, 10, 11], capacity=4, recent=2)
    assert Row(3, 30) in kept.rows()
    assert [row.step for row in kept.rows()][-2:] == [10, 11]


def test_the_newest_row_can_be_replaced():
    kept = filled([1, 2])
    kept.replace_newest(Row(2, 7))
    kept.add(Row(3, 1))
    assert [each.high[0] for each in kept.bins()] == [1, 7, 1]


def test_an_older_row_can_be_changed():
    kept = filled([1, 2, 3])
    kept.replace(2, lambda row: row._replace(other=5))
    assert [row.other for row in kept.rows()] == [None, 5, None]


@given(st.lists(st.integers(0, 1000), min_size=1, max_size=300))
def test_extremes_and_count_survive_any_thinning(peaks):
    kept = filled(peaks, capacity=8, recent=4)
    bins = kept.bins()
    assert sum(each.steps for each in bins) == len(peaks)
    assert max(each.high[0] for each in bins) == max(peaks) == max(row.peak for row in kept.rows())
    assert min(each.low[0] for each in bins) == min(peaks)
    assert [each.first for each in bins[1:]] == [each.last + 1 for each in bins[:-1]]


@pytest.mark.parametrize("count", [100, 10_000])
def test_a_run_of_any_length_takes_the_same_room(count):
    kept = filled(list(range(count)), capacity=8, recent=4)
    assert len(kept.bins()) <= 9
    assert len(kept.rows()) <= 12
