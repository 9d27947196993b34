"""Requests of sorting, selecting and scanning, as measured with torch 2.11 on an H100."""

import pytest
import torch

from tests.virtual_gpu.kernel_requests import requests


def sizes(function, *shape, dtype=torch.float32):
    def make():
        x = torch.zeros(shape, dtype=dtype, device="cuda")
        return lambda: function(x)

    found = requests(make, gpu="H100", release="2.11")
    return [entry[1] for entry in found if not isinstance(entry, int)]


def test_short_rows_are_sorted_in_place_with_one_row_of_indices():
    # values 64·100·4, indices 64·100·8, one row of them 100·8
    assert sizes(lambda x: x.sort(-1), 64, 100) == [25_600, 51_200, 800]


def test_one_long_row_is_one_radix_sort():
    # values, indices, indices in order, cub: 4 passes of bins 4·256·8, 2 tiles 2·256·4, copies, counters
    assert sizes(lambda x: x.sort(), 8000) == [32_000, 64_000, 64_000, 106_751]


def test_a_few_long_rows_are_sorted_by_value_then_by_row():
    # 14 rows of 50257: pairs of position and row twice, sorted values, cub's scratch of both sorts
    expected = [1_407_196, 5_628_784, 5_628_784, 5_628_784, 1_407_196, 7_168_767, 128_511]
    assert sizes(lambda x: x.sort(-1), 2, 7, 50257, dtype=torch.float16) == expected


def test_many_long_columns_are_copied_and_sorted_in_segments():
    expected = [32_768_000, 65_536_000, 32_768_000, 32_768_000, 65_536_000, 65_536_000, 98_304_255]
    assert sizes(lambda x: x.sort(0), 8192, 1000) == expected


def test_topk_of_long_rows_counts_digits():
    # 14 rows in 50 blocks of 1024 values: values and positions for each row, 512 bytes for each block, ...
    expected = [280, 560, 56, 112, 112, 14 * 50 * 512, 14 * 1024, 14 * 50 * 4, 14 * 50 * 4, 1279, 1279]
    assert sizes(lambda x: x.topk(5), 2, 7, 50257) == expected


def test_topk_of_short_rows_needs_no_scratch():
    assert sizes(lambda x: x.topk(5), 64, 100) == [64 * 5 * 4, 64 * 5 * 8]


def test_the_median_of_all_values_sorts_them():
    # sorted values, indices, indices in order, cub; then whether the last is not a number, and the result
    assert sizes(torch.median, 64, 100) == [25_600, 51_200, 51_200, 87_551, 1, 4]


@pytest.mark.parametrize(
    ("count", "expected"),
    [
        # 36 random bits: 64-bit keys, 5 passes
        (100_000, [800_000, 8, 800_000, 800_000, 800_000, 1_633_279]),
        # 23 random bits: 32-bit keys, one tile
        (1000, [8000, 8, 8000, 4000, 4000, 1]),
    ],
)
def test_a_permutation_sorts_random_keys(count, expected):
    assert sizes(lambda x: torch.randperm(count, device="cuda"), 1) == expected


def test_a_sum_along_one_row_is_cubs_scan():
    # 112 tiles of 896 values: 16·(112 + 32) bytes, and 511
    assert sizes(lambda x: x.cumsum(0), 100_000, dtype=torch.int64) == [800_000, 2815]


def test_nonzero_counts_and_selects():
    # the number, cub's sum (5 · 132 · 8 blocks), the indices, cub's selection
    found = sizes(lambda x: x.eq(0).nonzero(), 1000, 1000)
    assert found == [1_000_000, 4, 21_503, 1_000_000 * 2 * 8, 2815]


def test_distinct_values_keep_the_memory_of_all():
    # sorted values, cub's sort of keys, the result, the number, cub's selection
    found = sizes(lambda x: x.unique(), 100_000, dtype=torch.int64)
    assert found == [800_000, 835_327, 800_000, 8, 1023]
