"""Memory by line, layer and category: live blocks, difference of two tapes."""

from __future__ import annotations

import memexplore as mx
from memexplore.analysis import curves, groups
from memexplore.tape import Category, Frame, Meta, Source, Tape
from tests.sample_tapes import small_tape, training_tape


def test_by_line_sums_to_the_peak() -> None:
    table = groups.by_line(training_tape())
    assert table["size"].sum() == curves.peak(training_tape())[0]
    assert table["size"].is_monotonic_decreasing
    assert table["line"].is_unique


def test_by_line_after_a_row() -> None:
    # after row 4 of small_tape: 400 of line 3, 100 of line 5, 200 of line 6, 50 of line 7
    table = groups.by_line(small_tape(), 4)
    assert table["line"].tolist() == ["train.py:3", "train.py:6", "train.py:5", "train.py:7"]
    assert table["size"].tolist() == [400, 200, 100, 50]
    assert table["category"].tolist() == ["parameter", "activation", "input", "temporary"]


def one_layer(size: int, address: int, line: int = 3) -> Tape:
    return Tape.from_columns(
        {"address": [address], "size": [size], "module": [0], "stack": [0], "category": [Category.ACTIVATION]},
        modules=["fc"],
        stacks=[(Frame("train.py", line, "step"),)],
        meta=Meta(Source.MEASURED, "cpu"),
    )


def test_diff_ignores_addresses() -> None:
    table = mx.diff(one_layer(100, address=0), one_layer(250, address=4096))
    assert table.to_numpy().tolist() == [["fc", "train.py:3", "activation", 100, 250, 150]]


def test_diff_of_a_tape_with_itself_is_zero() -> None:
    table = mx.diff(training_tape(), training_tape())
    assert (table["difference"] == 0).all()
    assert table["before"].sum() == curves.peak(training_tape())[0]


def test_diff_has_rows_of_only_one_tape() -> None:
    table = mx.diff(one_layer(100, 0, line=3), one_layer(250, 0, line=4))
    assert table[["line", "before", "after", "difference"]].to_numpy().tolist() == [
        ["train.py:4", 0, 250, 250],
        ["train.py:3", 100, 0, -100],
    ]


def test_diff_sums_to_both_peaks() -> None:
    small, large = training_tape(batch=4), training_tape(batch=8)
    table = mx.diff(small, large)
    assert table["before"].sum() == curves.peak(small)[0]
    assert table["after"].sum() == curves.peak(large)[0]
    assert table["difference"].abs().is_monotonic_decreasing


def test_diff_in_one_line_has_sign_and_per_cent() -> None:
    assert repr(mx.diff(one_layer(2048, 0), one_layer(1024, 0))) == (
        "<Difference: Peak 2.00 KiB → 1.00 KiB allocated (−1.00 KiB, −50 %) · "
        "1 of 1 groups of layer, line and category differ>"
    )


def test_printed_diff_has_sizes_in_binary_units() -> None:
    title, head, row = str(mx.diff(one_layer(2048, 0), one_layer(1024, 0))).splitlines()
    assert title == "Peak 2.00 KiB → 1.00 KiB allocated (−1.00 KiB, −50 %)"
    assert head.split() == ["layer", "line", "category", "before", "after", "difference"]
    assert row.split() == ["fc", "train.py:3", "activation", "2.00", "KiB", "1.00", "KiB", "-1.00", "KiB"]


def test_part_of_a_diff_is_a_plain_frame() -> None:
    table = mx.diff(one_layer(2048, 0), one_layer(1024, 0))
    assert type(table[["before"]]).__name__ == type(table.head(1)).__name__ == "DataFrame"


def test_diff_of_empty_tapes_is_empty() -> None:
    assert len(mx.diff(small_tape()[:0], small_tape()[:0])) == 0
