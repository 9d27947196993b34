from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from memexplore.text.units import difference_text, parse_size, size_text


@pytest.mark.parametrize(
    ("size", "text"),
    [
        (0, "0 B"),
        (999, "999 B"),
        (1000, "0.98 KiB"),  # 1000 / 1024 = 0.977
        (1024, "1.00 KiB"),
        (10_240, "10.0 KiB"),
        (102_400, "100 KiB"),
        (1_048_064, "1.00 MiB"),  # 1023.5 KiB has four digits in KiB
        (9 * 1024**3 + 133 * 1024**2, "9.13 GiB"),  # 9 + 133 / 1024 = 9.1299
        (192 * 1024**3, "192 GiB"),
    ],
)
def test_size_text_has_three_digits_and_a_binary_unit(size, text):
    assert size_text(size) == text


def test_difference_text_has_sign_and_per_cent():
    # 9.1 to 4.3 GiB is 4.8 less, 4.8 / 9.1 = 53 %
    assert difference_text(9.1 * 1024**3, 4.3 * 1024**3) == "−4.80 GiB (−53 %)"


@given(st.integers(1, 10**6), st.sampled_from(["B", "KiB", "MiB", "GiB", "TiB"]))
def test_parse_size_reads_number_and_unit(number, unit):
    assert parse_size(f"{number}{unit}") == number * 1024 ** ["B", "KiB", "MiB", "GiB", "TiB"].index(unit)


@pytest.mark.parametrize("text", ["", "24", "GiB", "24 apples", "-3GiB"])
def test_text_without_number_and_unit_raises(text):
    with pytest.raises(ValueError, match="is not a size"):
        parse_size(text)
