import itertools
import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from memexplore.analysis.tradeoffs import Point, frontier
from memexplore.figures.palette import CAPACITY, FITS
from memexplore.figures.text import tradeoff_text
from memexplore.figures.tradeoff import XAxis, largest_batches, setting_hover_text, tradeoff

GIB = 1024**3
POINTS = [
    Point("as written", 1.0, 0.0, 18 * GIB, False),
    Point("checkpoint sqrt", 1.3, 0.31, 9 * GIB, True),
    Point("precision fp16", 0.5, 0.0, 12 * GIB, True),
    Point("offload", 4.0, 0.0, 10 * GIB, True),
]

pairs = st.lists(st.tuples(st.integers(0, 9).map(float), st.integers(0, 9)), max_size=20)


def trace(figure, name):
    return next(trace for trace in figure.data if trace.name == name)


# -- the frontier


@given(pairs)
def test_no_point_beats_the_frontier(points):
    for number in frontier(points):
        time, memory = points[number]
        assert not any(a <= time and b <= memory and (a, b) != (time, memory) for a, b in points)


@given(pairs)
def test_every_point_is_equalled_or_beaten_by_the_frontier(points):
    best = [points[number] for number in frontier(points)]
    assert all(any(a <= time and b <= memory for a, b in best) for time, memory in points)


@given(pairs)
def test_time_rises_and_memory_falls_along_the_frontier(points):
    best = [points[number] for number in frontier(points)]
    assert all(one[0] < other[0] and one[1] > other[1] for one, other in itertools.pairwise(best))


def test_point_with_nan_time_is_not_on_the_frontier():
    assert frontier([(math.nan, 1), (1.0, 2)]) == (1,)


# -- the figure


def test_fitting_settings_differ_by_colour_and_symbol():
    figure = tradeoff(POINTS, 14 * GIB)
    fits, does_not = trace(figure, "fits"), trace(figure, "does not fit")
    assert (fits.marker.color, does_not.marker.color) == (FITS, CAPACITY)
    assert fits.marker.symbol != does_not.marker.symbol
    assert list(fits.customdata) == [1, 2, 3]
    assert list(does_not.customdata) == [0]


def test_frontier_is_a_line_through_optimal_settings():
    line = trace(tradeoff(POINTS, 14 * GIB), "frontier")
    # fp16 is fastest; sqrt needs less memory; as written is beaten by fp16, offload (4.0, 10 GiB) by sqrt (1.3, 9 GiB)
    assert list(zip(line.x, line.y, strict=True)) == [(0.5, 12 * GIB), (1.3, 9 * GIB)]


def test_capacity_is_a_line():
    shapes = tradeoff(POINTS, 14 * GIB).layout.shapes
    assert [(shape.y0, shape.y1, shape.line.color) for shape in shapes] == [(14 * GIB, 14 * GIB, CAPACITY)]


def capacity_note(points: list[Point], capacity: int) -> Any:
    return next(note for note in tradeoff(points, capacity).layout.annotations if "capacity" in note.text)


def test_capacity_is_named_at_its_line():
    note = capacity_note(POINTS, 14 * GIB)
    assert (note.y, note.yref) == (14 * GIB, None)
    assert abs(note.yshift) < 15  # pixels


def test_capacity_is_named_above_the_axes_where_settings_lie_along_its_line():
    along = [
        Point(f"batch {number}", number / 20, 0.0, 14 * GIB + (number % 2) * GIB // 10, False) for number in range(41)
    ]
    note = capacity_note(along, 14 * GIB)
    assert (note.y, note.yref) == (1, "paper")


def test_capacity_far_above_the_points_is_only_a_label():
    figure = tradeoff(POINTS, 90 * GIB)
    assert not figure.layout.shapes
    assert figure.layout.yaxis.range[1] < 25 * GIB
    # 90 / 18 = 5
    assert "capacity 90.0 GiB, 5.0 times the highest ↑" in [note.text for note in figure.layout.annotations]


def test_axes_start_at_zero_and_contain_every_point():
    figure = tradeoff(POINTS, 14 * GIB)
    (left, right), (bottom, top) = figure.layout.xaxis.range, figure.layout.yaxis.range
    assert left == bottom == 0
    assert all(x < right for trace in figure.data for x in trace.x)
    assert all(y < top for trace in figure.data for y in trace.y)


def test_much_slower_setting_is_at_the_edge_with_its_value():
    figure = tradeoff(POINTS)
    # the median is 1.3: 4.0 is more than 2.5 * 1.3 = 3.25, and the slowest of the others is 1.3
    assert list(trace(figure, "fits").x) == [1.3, 0.5, 1.3]
    assert "4.0 →" in [note.text for note in figure.layout.annotations]


def test_x_axis_can_be_flops():
    figure = tradeoff(POINTS, x_axis=XAxis.FLOPS)
    assert list(trace(figure, "fits").x) == [1.31, 1.0, 1.0]
    assert figure.layout.xaxis.title.text == XAxis.FLOPS.value


def test_hover_text_has_the_knobs_and_the_margin():
    texts = trace(tradeoff(POINTS, 14 * GIB), "fits").text
    assert texts[0].startswith("<b>checkpoint sqrt</b>")
    # 14 - 9 = 5 GiB
    assert "5.00 GiB to spare" in texts[0]


def test_hover_text_has_the_missing_bytes():
    assert "4.00 GiB too much" in setting_hover_text(POINTS[0], 14 * GIB)


def test_setting_name_is_escaped():
    assert "&lt;lambda&gt;" in setting_hover_text(Point("<lambda>", 1.0, 0.0, 1, True))


def test_setting_with_nan_time_is_omitted():
    figure = tradeoff([*POINTS, Point("gpu", math.nan, math.nan, GIB, True)])
    assert len(trace(figure, "fits").x) == 3


def test_chosen_setting_has_a_ring_and_a_label():
    figure = tradeoff(POINTS, chosen="offload")
    assert list(trace(figure, "fits").marker.line.width) == [0, 0, 3]
    # 4.0 is beyond the edge, see above
    assert {"as written", "offload 4.0 →"} <= {note.text for note in figure.layout.annotations}


@pytest.mark.parametrize("points", [[], POINTS[:1]])
def test_few_settings_give_a_figure(points):
    figure = tradeoff(points, 14 * GIB)
    assert len(trace(figure, "fits").x) + len(trace(figure, "does not fit").x) == len(points)


# -- as text


def test_text_is_sorted_by_time_with_a_star_on_the_frontier():
    lines = tradeoff_text(POINTS, 14 * GIB).splitlines()
    assert lines[0] == "3 of 4 settings fit in 14.0 GiB"
    assert [line.split("  ")[-1].removeprefix(" ") for line in lines[2:]] == [
        "* precision fp16", "as written", "* checkpoint sqrt", "offload",
    ]  # fmt: skip


def test_nan_time_is_a_dash():
    assert "nan" not in tradeoff_text([Point("gpu", math.nan, math.nan, GIB, True)])


def test_setting_a_little_beyond_twice_the_capacity_is_where_it_belongs() -> None:
    # 22 of 10 GiB, less than 1.25 times 20
    figure = tradeoff(
        [Point("as written", 1.0, 0.0, 22 * GIB, False), Point("fp16", 0.5, 0.0, 8 * GIB, True)], 10 * GIB
    )
    assert list(trace(figure, "does not fit").y) == [22 * GIB]
    assert not [note.text for note in figure.layout.annotations if "↑" in note.text]


def test_settings_far_beyond_the_capacity_are_clipped_with_an_arrow() -> None:
    points = [Point("as written", 1.0, 0.0, 100 << 30, False), Point("fp16", 0.5, 0.0, 8 << 30, True)]
    figure = tradeoff(points, 10 << 30)
    crosses = next(trace for trace in figure.data if trace.name == "does not fit")
    # twice the capacity: 20 of 100 GiB
    assert list(crosses.y) == [20 << 30]
    assert "↑ 100 GiB" in [annotation.text for annotation in figure.layout.annotations]
    assert figure.layout.yaxis.range[1] < 25 << 30


def test_neighbours_far_beyond_the_capacity_have_one_text() -> None:
    far = [Point(f"batch {n}", 1 + n / 100, 0.0, n * 30 << 30, False) for n in (1, 2, 4, 8)]
    others = [Point("offload", 2.0, 0.0, 50 << 30, False), Point("fp16", 0.5, 0.0, 8 << 30, True)]
    figure = tradeoff([*far, *others], 10 << 30)
    texts = [annotation.text for annotation in figure.layout.annotations if "↑" in annotation.text]
    assert sorted(texts) == ["↑ 30.0–240 GiB", "↑ 50.0 GiB"]


def test_one_setting_has_no_frontier_in_the_legend() -> None:
    points = [Point("as written", 1.0, 0.0, 8 << 30, True), Point("sqrt", 1.3, 0.3, 4 << 30, True)]
    assert trace(tradeoff(points), "frontier").showlegend
    assert not trace(tradeoff(points[:1]), "frontier").showlegend


def test_names_stay_between_the_axes_of_a_chart_that_is_less_high() -> None:
    points = [Point(f"size {n}", 0.5 + 0.02 * n, 0.0, (92 - 3 * n) << 26, n > 4) for n in range(8)]
    for height in (220, 280, 320):
        figure = tradeoff(points, 7 << 30, height=height)
        assert figure.layout.height == height
        assert all(top >= 0 for _, top, _, _ in boxes(figure, 330)), height


def test_the_frontier_is_labelled_where_there_is_space() -> None:
    points = [
        Point("fast", 0.5, 0.0, 8 << 30, True),
        Point("small", 2.0, 0.0, 2 << 30, True),
        Point("beside", 1.99, 0.0, 2 << 30, True),
        Point("beaten", 2.0, 0.0, 9 << 30, True),
    ]
    texts = [annotation.text for annotation in tradeoff(points).layout.annotations]
    assert "fast" in texts
    assert "beside" in texts  # as small as the last and faster, so that one is not on the frontier
    assert "beaten" not in texts


# -- names of settings

BASE = "batch 32, gpu RTX 3060 8GB"
CROWDED = [
    Point(BASE, 0.8, 0.0, 109 << 26, False),
    *(Point(f"{BASE}, precision bf16, size {n}", 0.5 + 0.02 * n, 0.0, (92 - 3 * n) << 26, n > 4) for n in range(8)),
    Point(f"{BASE}, twin", 0.5, 0.0, 92 << 26, False),
]


def boxes(figure, width: float) -> list[tuple[float, float, float, float]]:
    """Pixels of the texts beside points, where the axes have this width: left, top, right, bottom."""
    right, top, height = figure.layout.xaxis.range[1], figure.layout.yaxis.range[1], figure.layout.height - 64
    found = []
    for note in figure.layout.annotations:
        if note.xref == "paper":
            continue
        x, y = note.x / right * width, (1 - note.y / top) * height
        x, y = (x + note.ax, y + note.ay) if note.showarrow else (x + note.xshift, y - note.yshift)
        x -= 6 * len(note.text) * {"left": 0, "center": 0.5, "right": 1}[note.xanchor]
        found.append((x, y - 7, x + 6 * len(note.text), y + 7))
    return found


@pytest.mark.parametrize("width", [240, 330, 480, 700])
def test_names_do_not_overlap_where_settings_are_close(width: int) -> None:
    found = boxes(tradeoff(CROWDED, 7 << 30), width)
    assert len(found) >= 3
    for one, other in itertools.combinations(found, 2):
        assert one[2] <= other[0] or other[2] <= one[0] or one[3] <= other[1] or other[3] <= one[1], (one, other)


def test_what_all_settings_have_is_not_in_their_names() -> None:
    texts = {note.text for note in tradeoff(CROWDED, 7 << 30, chosen=BASE).layout.annotations}
    assert "precision bf16, size 7" in texts
    assert BASE in texts


def test_settings_at_one_place_share_a_label() -> None:
    points = [Point("as written", 1.0, 0.0, 8 << 30, True), Point("sqrt", 1.0, 0.0, 8 << 30, True)]
    assert "as written = sqrt" in {note.text for note in tradeoff(points, chosen="sqrt").layout.annotations}


def test_largest_batches_have_names_too() -> None:
    figure = largest_batches([Point("fp16", 0.5, 0.0, 1024, True), Point("sqrt", 1.3, 0.3, 512, True)], [8, 16])
    # the larger batch needs less memory: it alone is on the frontier
    assert [note.text for note in figure.layout.annotations] == ["sqrt"]
