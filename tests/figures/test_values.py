"""HTML forms of values: their sentences, sparklines, tables and bars."""

from __future__ import annotations

import re
import xml.etree.ElementTree as ET

import pytest

import memexplore as mx
from memexplore.analysis import curves
from memexplore.analysis.verdict_content import verdict_content
from memexplore.figures import values
from memexplore.figures.palette import CAPACITY
from memexplore.tape import Action, Category, Meta, Source, Tape
from tests.sample_tapes import GIB, T4, Program, big_tape, oom_tape, small_tape, training_tape


def parsed(page: str) -> ET.Element:
    """Return HTML as a tree; that it can be parsed shows that every element is closed."""
    return ET.fromstring(page.replace("&nbsp;", " "))


def cells(page: str) -> list[list[str]]:
    """Return the texts of the rows of the table."""
    return [["".join(cell.itertext()) for cell in row] for row in parsed(page).iter("tr")]


def test_tape_is_one_line() -> None:
    headline = verdict_content(training_tape()).headline
    assert repr(training_tape()) == f"<Tape: {len(training_tape()):,} events · {headline} · predicted on Tesla T4>"
    assert "\n" not in repr(oom_tape())


def test_tape_that_is_not_placed_says_so() -> None:
    tape = Tape.from_columns({"action": [Action.ALLOC], "size": [8]}, meta=Meta(Source.MEASURED, "cuda:0"))
    assert repr(tape) == (
        "<Tape: 1 event · not placed: memexplore.replay(tape) assigns addresses · measured on cuda:0>"
    )
    assert "not placed" in tape._repr_html_()


def test_tape_has_its_verdict_and_its_categories_in_one_unit() -> None:
    page = small_tape()._repr_html_()
    assert "<b>Peak 750 B allocated in step 1, forward of Net</b>" in page
    # 400 + 200 + 100 + 50 = 750 bytes at the peak
    assert [row[:3] for row in cells(page)] == [
        ["at the peak", "allocated, B", "share"],
        ["parameter", "400", "53.3 %"],
        ["activation", "200", "26.7 %"],
        ["input", "100", "13.3 %"],
        ["temporary", "50", "6.7 %"],
    ]


def test_tape_out_of_memory_has_its_line() -> None:
    assert "train.py, line 7" in oom_tape()._repr_html_()


def test_empty_tape_has_a_form() -> None:
    assert "Peak 0 B allocated" in small_tape()[:0]._repr_html_()


@pytest.mark.parametrize("tape", [small_tape(), training_tape(), oom_tape()], ids=["small", "training", "oom"])
def test_sparkline_reaches_the_peak_at_its_row(tape: Tape) -> None:
    root = ET.fromstring(values.sparkline(tape, width=len(tape)))
    circle = next(root.iter("circle"))
    path = next(root.iter("path")).get("d", "")
    heights = [float(number) for number in re.findall(r"V([\d.]+)", path)]
    assert min(heights) == float(circle.get("cy", "nan"))
    assert float(circle.get("cx", "nan")) == curves.peak(tape)[1]


def test_sparkline_of_many_events_has_few_points() -> None:
    # 240 points, and the way back to the axis
    assert values.sparkline(big_tape(100_000)).count("V") <= 2 * 241 + 2


def test_capacity_is_drawn_if_it_is_near() -> None:
    tape = small_tape()
    near, far = (tape.replace(meta=T4._replace(capacity=capacity)) for capacity in (1000, 100_000))
    assert values.sparkline(near).count(CAPACITY) == 2  # the line and the dot of the peak
    assert values.sparkline(far).count(CAPACITY) == 1


def test_sparklines_below_each_other_have_one_scale() -> None:
    # 750 bytes at a scale of 1500: half of the 72 - 8 pixels above the axis at 72 - 2
    circle = next(ET.fromstring(values.sparkline(small_tape(), top=1500)).iter("circle"))
    assert float(circle.get("cy", "nan")) == 70 - 32


# -- differences


def held(sizes: dict[Category, int]) -> Tape:
    program = Program()
    for kind, size in sizes.items():
        program.alloc(size, kind, "op", "fc", 3)
    return program.tape()


def test_difference_has_signs_and_bars_on_two_sides() -> None:
    before = held({Category.ACTIVATION: 4 * GIB, Category.PARAMETER: GIB, Category.BUFFER: GIB})
    after = held({Category.ACTIVATION: 2 * GIB, Category.PARAMETER: 2 * GIB, Category.BUFFER: GIB})
    page = mx.diff(before, after)._repr_html_()
    assert "Peak 6.00 GiB → 5.00 GiB allocated (−1.00 GiB, −17 %)" in page
    assert [[row[1], *row[3:6]] for row in cells(page)] == [
        ["difference, GiB", "before, GiB", "after, GiB", "category"],
        ["−2.00", "4.00", "2.00", "activation"],
        ["+1.00", "1.00", "2.00", "parameter"],
    ]
    # The largest change, -2, fills the left half; +1 half of the right half.
    assert re.findall(r"left:([\d.]+)%;width:([\d.]+)%", page) == [("0.0", "50.0"), ("50.0", "25.0")]
    assert "Not shown: 1 without a difference." in page


def test_long_difference_is_cut() -> None:
    page = mx.diff(held({}), training_tape())._repr_html_()
    assert len(cells(page)) == 1 + 25
    assert "more differences" in page


def test_names_are_escaped() -> None:
    program = Program()
    program.alloc(8, Category.INPUT, "op", "<b>", 3)
    page = mx.diff(held({}), program.tape())._repr_html_()
    assert "&lt;b&gt;" in page


def test_forms_use_the_colour_of_the_page_for_text() -> None:
    for page in (training_tape()._repr_html_(), mx.diff(small_tape(), training_tape())._repr_html_()):
        assert not re.search(r"(?<!-)color:#", page)
        assert "<style" not in page
        assert "<script" not in page
