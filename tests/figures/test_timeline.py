"""Timeline of a tape: curves, hover texts, labels, ticks and scale."""

from __future__ import annotations

import dataclasses
import itertools
import re

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from memexplore.analysis import curves
from memexplore.figures import bands
from memexplore.figures.labels import Box, box_of
from memexplore.figures.palette import COLOURS, Theme, byte_ticks, event_ticks, text_colour
from memexplore.figures.positions import XChoice, equal_steps, positions
from memexplore.figures.scale import scale
from memexplore.figures.timeline import hover_texts, outline_trace, timeline, timeline_arrays
from memexplore.figures.timeline_layout import Plot, plot_labels, window_layout, window_rows
from memexplore.tape import Action, Category, Meta, Phase, Source, Tape
from tests.sample_tapes import GIB, big_tape, oom_tape, small_tape, training_tape, unwound_tape

NAMES = [kind.text for kind in Category]


BIG = big_tape(50_000)
BIG_BY_KIND = curves.by_category(BIG)


def trace(figure, name):
    return next(trace for trace in figure.data if trace.name == name)


def texts(layout) -> list[str]:
    return [note["text"] for note in layout["annotations"]]


# -- arrays


def test_short_tape_keeps_every_row():
    arrays = timeline_arrays(small_tape())
    assert arrays["row"].tolist() == list(range(15))
    assert arrays["allocated"].tolist() == curves.curve(small_tape()).tolist()


def test_long_tape_has_at_most_the_requested_points():
    assert 500 < len(timeline_arrays(BIG, points=1000)["row"]) <= 1000


def test_drawn_values_are_exact():
    arrays = timeline_arrays(BIG, points=1000)
    rows = arrays["row"].astype(int)
    assert np.array_equal(arrays["allocated"], curves.curve(BIG)[rows])
    assert np.array_equal(arrays["reserved"], curves.curve(BIG, "reserved")[rows])


def test_categories_sum_to_allocated():
    arrays = timeline_arrays(BIG, points=1000)
    assert np.array_equal(sum(arrays[name] for name in NAMES), arrays["allocated"])


def test_maximum_of_every_interval_is_kept():
    points = 1000
    arrays = timeline_arrays(BIG, points=points)
    drawn = arrays["row"].astype(int)
    curve = curves.curve(BIG)
    # 1000 points minus 14 for both ends and twelve categories, 4 per interval: 246 intervals of 204 rows
    for start in range(0, len(BIG), 204):
        inside = drawn[(drawn >= start) & (drawn < start + 204)]
        assert curve[inside].max() == curve[start : start + 204].max()


@given(st.integers(0, 49_999), st.integers(1, 50_000), st.integers(32, 400))
def test_every_maximum_of_a_window_is_kept(first, length, points):
    tape = BIG
    last = min(first + length, len(tape) - 1)
    arrays = timeline_arrays(tape, (first, last), points)
    part = slice(first, last + 1)
    assert len(arrays["row"]) <= points
    assert arrays["allocated"].max() == curves.curve(tape)[part].max()
    assert arrays["reserved"].max() == curves.curve(tape, "reserved")[part].max()
    by_kind = BIG_BY_KIND[:, part]
    assert [arrays[name].max() for name in NAMES] == by_kind.max(axis=1).tolist()


def test_fractional_window_is_rounded_outwards():
    assert timeline_arrays(small_tape(), (2.4, 4.6))["row"].tolist() == [2, 3, 4, 5]


def test_window_is_cut_to_the_tape():
    assert timeline_arrays(small_tape(), (-3, 100))["row"].tolist() == list(range(15))


def test_too_few_points_raise():
    with pytest.raises(ValueError, match="31 points are too few"):
        timeline_arrays(small_tape(), points=31)


def test_hover_text_has_event_layer_op_and_every_category():
    assert hover_texts(small_tape(), np.array([3]))[0].split("<br>") == [
        "step 1, forward",
        "+200 B activation",
        "layer: fc",
        "op: addmm",
        "<b>700 B allocated</b>",
        "100 B input",
        "200 B activation",
        "400 B parameter",
    ]


def test_hover_text_of_a_free_has_the_layer_of_the_allocation():
    tape = small_tape()
    without_names = tape.replace(
        module=np.where(np.arange(15) == 8, -1, tape.module), op=np.where(np.arange(15) == 8, -1, tape.op)
    )
    assert hover_texts(without_names, np.array([8]))[0].split("<br>")[:4] == [
        "step 1, backward",
        "−200 B activation",
        "layer: fc",
        "op: addmm",
    ]


def test_hover_text_of_a_prediction_has_no_time():
    tape = small_tape()
    tape = tape.replace(time=np.arange(15) * 1_000_000, meta=tape.meta._replace(source=Source.PREDICTED))
    assert " ms" not in hover_texts(tape, np.array([3]))[0]


def test_hover_text_has_the_time_of_a_tape_with_a_clock():
    tape = small_tape().replace(time=np.arange(15) * 1_000_000)
    assert hover_texts(tape, np.arange(15))[3].startswith("step 1, forward, 3.0 ms<br>")


# -- timeline


def test_categories_are_stacked_bottom_to_top_in_their_colours():
    areas = [trace for trace in timeline(training_tape()).data if trace.stackgroup]
    order = list(Category)[: Category.UNKNOWN]  # those after it are of several ranks
    assert [(area.name, area.fillcolor) for area in areas] == [(kind.text, COLOURS[kind]) for kind in order]


def test_peak_has_marker_and_label():
    figure = timeline(small_tape())
    # the row of set-up takes a twentieth of the axis: 13 rows after it are 19 parts, and row 4 is 3 rows after row 1
    assert trace(figure, "peak").x[0] == pytest.approx(13 / 19 + 3)
    assert trace(figure, "peak").y[0] == 750
    assert "<b>peak 750 B</b>" in texts(figure.layout)


def test_axis_starts_at_zero_with_binary_ticks():
    axis = timeline(training_tape()).layout.yaxis
    assert axis.range[0] == 0
    assert axis.ticktext == ("0", "1 GiB", "2 GiB", "3 GiB")


def test_capacity_near_the_peak_is_a_line():
    layout = window_layout(oom_tape())
    assert [shape["y0"] for shape in layout["shapes"] if shape.get("xref") == "paper"] == [4 * GIB]
    assert "capacity 4.00 GiB" in texts(layout)


def test_capacity_far_above_the_peak_is_only_a_label():
    tape = training_tape(steps=1, batch=1)
    layout = window_layout(tape)
    reserved, _ = curves.peak(tape, "reserved")
    assert layout["yaxis"]["range"][1] == 1.2 * reserved
    assert any(re.fullmatch(r"capacity 14\.6 GiB, [\d.]+ times the peak reserved ↑", label) for label in texts(layout))


def test_out_of_memory_has_a_label():
    assert "<b>out of memory: 2.00 GiB requested</b>" in texts(window_layout(oom_tape()))


@pytest.mark.parametrize("width", [400, 640, 1200])
def test_label_of_a_failed_request_lies_inside_the_plot(width):
    layout = window_layout(unwound_tape(), width=width)
    note = next(note for note in layout["annotations"] if "requested" in note["text"])
    # A letter of size 12 is 7.3 pixels wide. With margins of 76 and 24 pixels, 400 leave 300: less than twice the text.
    length = len(note["text"].removeprefix("<b>").removesuffix("</b>")) * 7.3
    left = note["xshift"] - {"left": 0, "right": length}[note["xanchor"]]
    assert 0 <= left <= width - 76 - 24 - length


@pytest.mark.parametrize(("share", "is_above"), [(2.0, True), (0.962, False)])
def test_capacity_label_is_not_on_the_line_of_reserved_bytes(share, is_above):
    # An axis of 316 pixels ends at 1.2 times the higher line. 0.962 of the reserved bytes are (1 - 0.962) / 1.2 * 316
    # = 10 pixels below them: above the line of the capacity, the label would lie on that of the reserved bytes.
    tape = training_tape()
    reserved = curves.peak(tape, "reserved")[0]
    tape = dataclasses.replace(tape, meta=tape.meta._replace(capacity=int(share * reserved)))
    note = next(note for note in window_layout(tape)["annotations"] if note["text"].startswith("capacity"))
    assert note["yshift"] == pytest.approx(10 if is_above else -10)


def test_capacity_label_has_a_place_of_its_own_in_a_narrow_plot():
    # As above, on an axis of 140 pixels, where the failed request takes the place below the line of the capacity.
    tape = unwound_tape()
    reserved = curves.peak(tape, "reserved")[0]
    tape = dataclasses.replace(tape, meta=tape.meta._replace(capacity=int(0.962 * reserved)))
    heights = scale(tape)
    plot = Plot(tape, *window_rows(tape, None), positions(tape), 270, 140, heights.ceiling * 1.2)
    boxes = [box_of(placed.label, placed.spot) for placed in plot_labels(plot, heights)]
    boxes.append(Box(0, plot.y(reserved) - 1, 270, plot.y(reserved) + 1))
    *others, capacity, line = boxes
    assert [capacity.overlap(box) for box in (*others, line)] == [0.0] * len(boxes[1:])


@pytest.mark.parametrize("width", [410, 820])
def test_label_of_a_far_capacity_hides_no_curve_without_steps(width):
    columns = {"address": [0, 512, 1024, 512], "size": [512, 512, 512, 512], "action": [0, 0, 0, 1]}
    tape = Tape.from_columns(columns, meta=Meta(Source.PREDICTED, "T4", capacity=46 * 1536))
    heights = scale(tape)
    plot = Plot(tape, *window_rows(tape, None), positions(tape), width - 100, 140, heights.ceiling * 1.2)
    *_, capacity = [box_of(placed.label, placed.spot) for placed in plot_labels(plot, heights)]
    assert capacity.bottom < plot.y(heights.highest)


@pytest.mark.parametrize("width", [500, 700])
def test_label_of_a_far_capacity_hides_no_curve_below_phases(width):
    # On 176 pixels the axis ends 42 above the highest curve: 15 to the middle of the peak's label, 7.5 to its top, 17.5
    # of the other label and its distance from the border, and 2 between both.
    tape = training_tape(steps=1, batch=1)
    top = window_layout(tape, width=width, inner_height=176)["yaxis"]["range"][1]
    plot = Plot(tape, *window_rows(tape, None), positions(tape), width - 100, 176, top)
    heights = scale(tape)
    assert plot.y(heights.highest) == pytest.approx(42)
    *_, capacity = [box_of(placed.label, placed.spot) for placed in plot_labels(plot, heights)]
    assert capacity.bottom < plot.y(heights.highest)


@pytest.mark.parametrize("inner_height", [20, 42])
def test_curves_have_half_of_a_very_low_plot(inner_height):
    tape = training_tape(steps=1, batch=1)
    layout = window_layout(tape, inner_height=inner_height)
    assert layout["yaxis"]["range"][1] == 2 * curves.peak(tape, "reserved")[0]


def test_axis_title_names_the_source():
    assert timeline(training_tape()).layout.yaxis.title.text == "allocated, predicted"


def test_steps_and_phases_are_labelled():
    labels = texts(window_layout(training_tape(), width=900))
    assert labels[:2] == ["forward", "backward"]
    assert [label for label in labels if label.startswith("step")] == ["step 1", "step 2", "step 3"]


@pytest.mark.parametrize("width", [590, 790, 1190])
def test_label_of_the_last_step_is_not_below_the_buttons(width):
    tape = training_tape(steps=2)
    layout = window_layout(tape, width=width)
    inner = width - 100
    low, high = layout["xaxis"]["range"]
    (note,) = (note for note in layout["annotations"] if note["text"] == "step 2")
    centre = (note["x"] - low) / (high - low) * inner + note["xshift"]
    # plotly's six buttons are 168 pixels wide, 22 of which are in the margin
    assert centre + len("step 2") * 6.3 / 2 <= inner - 146
    rows = np.flatnonzero(tape.step == 2)
    assert centre - len("step 2") * 6.3 / 2 >= (positions(tape).x(rows[:1])[0] - low) / (high - low) * inner


@pytest.mark.parametrize("steps", [1, 7, 30, 300])
def test_step_labels_do_not_overlap(steps):
    # 760 pixels for `steps` steps of 100 rows, 6.5 pixels per letter
    shown = (0, 100 * steps)
    all_bands = [bands.Band(100 * n, 100 * n + 100, f"step {n + 1}") for n in range(steps)]
    kept = bands.with_visible_label(all_bands, lambda row: row / shown[1] * 760)
    centres = [(band.first + band.last) / 2 / shown[1] * 760 for band in kept]
    assert kept
    halves = [len(band.text) / 2 * 6.5 for band in kept]
    edges = [(centre - half, centre + half) for centre, half in zip(centres, halves, strict=True)]
    assert all(left[1] <= right[0] for left, right in itertools.pairwise(edges))


@pytest.mark.parametrize("width", [640, 900, 1400])
def test_phase_label_fits_into_its_band(width):
    tape = training_tape()
    notes = [note for note in window_layout(tape, width=width)["annotations"] if note["font"]["size"] == 10]
    assert notes
    x = positions(tape).x
    shown = bands.phases(tape, (0, len(tape) - 1))
    ends = [x([band.first, band.last]) for band in shown]
    rows = {float(end.mean()): float(np.diff(end)[0]) for end in ends}
    for note in notes:
        # 100 pixels are margins; letters of size 10 are about 6 pixels wide; one letter stays free on both sides
        available = rows[note["x"]] / float(x([len(tape) - 1])[0]) * (width - 100)
        assert available >= (len(note["text"]) + 2) * 6


def test_tape_without_marks_has_the_same_bands():
    tape = small_tape()
    unmarked = tape.replace(action=np.where(tape.action == Action.MARK, Action.SNAPSHOT, tape.action))
    assert bands.phases(unmarked, (0, 14)) == bands.phases(tape, (0, 14))
    assert bands.steps(unmarked, (0, 14)) == bands.steps(tape, (0, 14))


@pytest.mark.parametrize("colour", COLOURS.values())
def test_text_colour_has_contrast_with_every_category(colour):
    def luminance(text):
        channels = [int(text[start : start + 2], 16) / 255 for start in (1, 3, 5)]
        linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels]
        return sum(weight * value for weight, value in zip((0.2126, 0.7152, 0.0722), linear, strict=True))

    light, dark = sorted((luminance(colour), luminance(text_colour(colour))), reverse=True)
    # WCAG 2.2 requires a contrast of 4.5
    assert (light + 0.05) / (dark + 0.05) >= 4.5


def test_bands_are_cut_to_the_window():
    # marks at rows 1 (forward), 7 (backward), 13 (optimizer)
    assert bands.phases(small_tape(), (3, 9)) == [
        bands.Band(3, 7, "forward", Phase.FORWARD),
        bands.Band(7, 9, "backward", Phase.BACKWARD),
    ]
    assert bands.steps(small_tape(), (0, 14)) == [bands.Band(0, 1, "set-up"), bands.Band(1, 14, "step 1")]


def test_outline_at_folded_steps_is_the_last_of_them():
    tape = training_tape(steps=5)
    (fold,) = equal_steps(tape)
    size = np.where(tape.step == 5, 2 * tape.size, tape.size)
    before = tape.replace(size=size)
    outline = outline_trace(before, tape, points=5000, x=XChoice())
    # steps 2 to 5 have the place of step 2; only step 5 of the other tape, which is higher, is drawn there
    assert len(outline["x"]) == len(tape) - (fold.hidden[1] - fold.hidden[0])
    assert np.all(np.diff(outline["x"]) > 0)
    assert max(outline["y"]) == curves.peak(before)[0] > curves.peak(tape)[0]


def test_outline_has_no_points_of_folded_steps():
    tape = training_tape(steps=5)
    (fold,) = equal_steps(tape)
    outline = outline_trace(tape, tape, points=5000, x=XChoice())
    # the rows of steps 3 to 5 have no place: drawn at the end of step 2 they were a vertical line
    assert len(outline["x"]) == len(tape) - (fold.hidden[1] - fold.hidden[0])
    assert np.all(np.diff(outline["x"]) > 0)
    assert max(outline["y"]) == curves.peak(tape)[0]


def test_theme_sets_the_text_colour():
    assert timeline(small_tape(), theme=Theme.DARK).layout.font.color == "#d6d6d6"


# -- ticks and scale


@given(st.integers(1, 2**45), st.integers(2, 8))
def test_byte_ticks_are_at_most_the_highest_value(highest, most):
    values, _ = byte_ticks(highest, most)
    assert values[0] == 0
    assert values[-1] <= highest
    assert len(values) - 1 <= most


@given(st.integers(0, 10**7), st.integers(0, 10**7))
def test_event_ticks_are_on_the_axis(first, length):
    ticks = event_ticks(first, first + length)
    assert all(first <= tick <= first + length for tick in ticks)
    assert len(ticks) <= 7
