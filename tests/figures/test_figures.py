import itertools
import re
import xml.etree.ElementTree as ET

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from memexplore.analysis import curves, summary
from memexplore.analysis import tables as analysis_tables
from memexplore.figures import bands, static, tables, text
from memexplore.figures.hover import hover_texts
from memexplore.figures.layers import ROOT, layer_of_box, layers_figure
from memexplore.figures.palette import COLOURS, Theme, byte_ticks, event_ticks, text_colour
from memexplore.figures.scale import scale
from memexplore.figures.timeline import timeline, timeline_arrays, window_layout
from memexplore.tape import Action, Category, Phase, Source, Tape
from tests.sample_tapes import CPU, GIB, T4, Program, big_tape, oom_tape, small_tape, training_tape

NAMES = [kind.text for kind in Category]


BIG = big_tape(50_000)
BIG_BY_KIND = curves.by_category(BIG)


def trace(figure, name):
    return next(trace for trace in figure.data if trace.name == name)


def texts(layout) -> list[str]:
    return [note["text"] for note in layout["annotations"]]


# -- arrays


def test_a_short_tape_is_drawn_whole():
    arrays = timeline_arrays(small_tape())
    assert arrays["row"].tolist() == list(range(15))
    assert arrays["allocated"].tolist() == curves.curve(small_tape()).tolist()


def test_a_long_tape_is_drawn_with_no_more_than_points():
    assert 500 < len(timeline_arrays(BIG, points=1000)["row"]) <= 1000


def test_what_is_drawn_is_exact():
    arrays = timeline_arrays(BIG, points=1000)
    rows = arrays["row"].astype(int)
    assert np.array_equal(arrays["allocated"], curves.curve(BIG)[rows])
    assert np.array_equal(arrays["reserved"], curves.curve(BIG, "reserved")[rows])


def test_the_stack_adds_up_to_allocated():
    arrays = timeline_arrays(BIG, points=1000)
    assert np.array_equal(sum(arrays[name] for name in NAMES), arrays["allocated"])


def test_the_highest_of_every_stretch_is_kept():
    points = 1000
    arrays = timeline_arrays(BIG, points=points)
    drawn = arrays["row"].astype(int)
    curve = curves.curve(BIG)
    # 1000 points less 11 for both ends and nine categories, four for a stretch: 247 stretches of 203 rows
    for begin in range(0, len(BIG), 203):
        inside = drawn[(drawn >= begin) & (drawn < begin + 203)]
        assert curve[inside].max() == curve[begin : begin + 203].max()


@settings(deadline=None)
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


def test_a_window_between_rows_is_taken_outwards():
    assert timeline_arrays(small_tape(), (2.4, 4.6))["row"].tolist() == [2, 3, 4, 5]


def test_a_window_beyond_the_tape_is_cut():
    assert timeline_arrays(small_tape(), (-3, 100))["row"].tolist() == list(range(15))


def test_too_few_points_are_refused():
    with pytest.raises(ValueError, match="31 points are too few"):
        timeline_arrays(small_tape(), points=31)


def test_hover_says_event_layer_op_and_every_category():
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


def test_hover_at_a_free_names_the_layer_that_made_the_block():
    tape = small_tape()
    nameless = tape.replace(
        module=np.where(np.arange(15) == 8, -1, tape.module), op=np.where(np.arange(15) == 8, -1, tape.op)
    )
    assert hover_texts(nameless, np.array([8]))[0].split("<br>")[:4] == [
        "step 1, backward",
        "−200 B activation",
        "layer: fc",
        "op: addmm",
    ]


def test_hover_of_a_prediction_tells_no_time():
    tape = small_tape()
    tape = tape.replace(time=np.arange(15) * 1_000_000, meta=tape.meta._replace(source=Source.PREDICTED))
    assert " ms" not in hover_texts(tape, np.array([3]))[0]


def test_hover_tells_the_time_where_there_is_a_clock():
    tape = small_tape().replace(time=np.arange(15) * 1_000_000)
    assert hover_texts(tape, np.arange(15))[3].startswith("step 1, forward, 3.0 ms<br>")


# -- timeline


def test_categories_are_stacked_bottom_to_top_in_their_colours():
    areas = [trace for trace in timeline(training_tape()).data if trace.stackgroup]
    order = [kind for kind in Category if kind is not Category.UNKNOWN]
    assert [(area.name, area.fillcolor) for area in areas] == [(kind.text, COLOURS[kind]) for kind in order]


def test_the_peak_is_marked():
    figure = timeline(small_tape())
    assert (trace(figure, "peak").x[0], trace(figure, "peak").y[0]) == (4, 750)
    assert "<b>peak 750 B</b>" in texts(figure.layout)


def test_the_axis_starts_at_zero_and_its_ticks_are_binary():
    axis = timeline(training_tape()).layout.yaxis
    assert axis.range[0] == 0
    assert axis.ticktext == ("0", "1 GiB", "2 GiB", "3 GiB")


def test_a_near_capacity_is_a_line():
    layout = window_layout(oom_tape())
    assert [shape["y0"] for shape in layout["shapes"] if shape.get("xref") == "paper"] == [4 * GIB]
    assert "capacity 4.00 GiB" in texts(layout)


def test_a_far_capacity_does_not_squash_the_picture():
    tape = training_tape(steps=1, batch=1)
    layout = window_layout(tape)
    reserved, _ = curves.peak(tape, "reserved")
    assert layout["yaxis"]["range"][1] == 1.2 * reserved
    assert any(re.fullmatch(r"capacity 14\.6 GiB, [\d.]+ times the peak reserved ↑", words) for words in texts(layout))


def test_running_out_of_memory_is_marked():
    assert "<b>out of memory: 2.00 GiB requested</b>" in texts(window_layout(oom_tape()))


def test_the_source_is_said():
    assert timeline(training_tape()).layout.yaxis.title.text == "allocated, predicted"


def test_steps_and_phases_are_labelled():
    words = texts(window_layout(training_tape(), width=900))
    assert words[:2] == ["forward", "backward"]
    assert [word for word in words if word.startswith("step")] == ["step 1", "step 2", "step 3"]


@pytest.mark.parametrize("steps", [1, 7, 30, 300])
def test_labels_of_steps_do_not_overlap(steps):
    # 760 pixels for `steps` steps of 100 rows, 6.5 pixels a letter
    shown = (0, 100 * steps)
    all_bands = [bands.Band(100 * n, 100 * n + 100, f"step {n + 1}") for n in range(steps)]
    kept = bands.with_visible_label(all_bands, shown, 760)
    centres = [(band.first + band.last) / 2 / shown[1] * 760 for band in kept]
    assert kept
    halves = [len(band.text) / 2 * 6.5 for band in kept]
    edges = [(centre - half, centre + half) for centre, half in zip(centres, halves, strict=True)]
    assert all(left[1] <= right[0] for left, right in itertools.pairwise(edges))


@pytest.mark.parametrize("width", [640, 900, 1400])
def test_a_phase_is_named_only_where_its_band_has_room(width):
    tape = training_tape()
    notes = [note for note in window_layout(tape, width=width)["annotations"] if note["font"]["size"] == 10]
    assert notes
    rows = {(band.first + band.last) / 2: band.last - band.first for band in bands.phases(tape, (0, len(tape) - 1))}
    for note in notes:
        # 100 pixels are margins; 10 pixel letters are about 6 wide, and a letter's room stays free on both sides
        room = rows[note["x"]] / (len(tape) - 1) * (width - 100)
        assert room >= (len(note["text"]) + 2) * 6


def test_an_imported_tape_has_bands_without_marks():
    tape = small_tape()
    unmarked = tape.replace(action=np.where(tape.action == Action.MARK, Action.SNAPSHOT, tape.action))
    assert bands.phases(unmarked, (0, 14)) == bands.phases(tape, (0, 14))
    assert bands.steps(unmarked, (0, 14)) == bands.steps(tape, (0, 14))


@pytest.mark.parametrize("colour", COLOURS.values())
def test_ink_is_readable_on_every_category(colour):
    def luminance(text):
        channels = [int(text[place : place + 2], 16) / 255 for place in (1, 3, 5)]
        linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels]
        return sum(weight * value for weight, value in zip((0.2126, 0.7152, 0.0722), linear, strict=True))

    light, dark = sorted((luminance(colour), luminance(text_colour(colour))), reverse=True)
    # WCAG 2.2 asks for a contrast of 4.5
    assert (light + 0.05) / (dark + 0.05) >= 4.5


def test_bands_of_a_window_are_cut_to_it():
    # marks at rows 1 (forward), 7 (backward), 13 (optimizer)
    assert bands.phases(small_tape(), (3, 9)) == [
        bands.Band(3, 7, "forward", Phase.FORWARD),
        bands.Band(7, 9, "backward", Phase.BACKWARD),
    ]
    assert bands.steps(small_tape(), (0, 14)) == [bands.Band(0, 1, "set-up"), bands.Band(1, 14, "step 1")]


def test_a_theme_gives_the_text_its_colour():
    assert timeline(small_tape(), theme=Theme.DARK).layout.font.color == "#d6d6d6"


# -- ticks and scale


@given(st.integers(1, 2**45), st.integers(2, 8))
def test_byte_ticks_stay_below_the_highest(highest, most):
    values, _ = byte_ticks(highest, most)
    assert values[0] == 0
    assert values[-1] <= highest
    assert len(values) - 1 <= most


@given(st.integers(0, 10**7), st.integers(0, 10**7))
def test_event_ticks_lie_on_the_axis(first, length):
    ticks = event_ticks(first, first + length)
    assert all(first <= tick <= first + length for tick in ticks)
    assert len(ticks) <= 7


def test_the_label_of_the_peak_stands_above_a_close_capacity():
    # 3 GiB of 3.2 GiB: less than an eighth above
    close = oom_tape().replace(meta=T4._replace(capacity=int(3.2 * GIB)))
    assert scale(close).label == int(3.2 * GIB)
    assert scale(oom_tape()).label == 3 * GIB


# -- layers


def boxes(figure) -> dict[str, tuple[str, int]]:
    chart = figure.data[0]
    return {name: (parent, value) for name, parent, value in zip(chart.ids, chart.parents, chart.values, strict=True)}


def test_icicle_of_the_small_tape():
    assert boxes(layers_figure(small_tape())) == {
        ROOT: ("", 920),  # 400 + 200 + 240 + 80
        "Net": (ROOT, 920),
        "fc": ("Net", 920),
        "fc · activation": ("fc", 200),
        "fc · parameter": ("fc", 400),
        "fc · gradient": ("fc", 240),
        "fc · optimizer state": ("fc", 80),
    }


def test_boxes_never_hold_less_than_those_inside():
    figure = layers_figure(training_tape())
    for button in figure.layout.updatemenus[0].buttons:
        chart = {key: values[0] for key, values in button.args[0].items()}
        inside = dict.fromkeys(chart["ids"], 0)
        for parent, value in zip(chart["parents"], chart["values"], strict=True):
            if parent:
                inside[parent] += value
        assert all(inside[name] <= value for name, value in zip(chart["ids"], chart["values"], strict=True))
        assert len(set(chart["ids"])) == len(chart["ids"])


def test_a_module_around_one_other_gets_no_box():
    labels = dict(
        zip(layers_figure(training_tape()).data[0].ids, layers_figure(training_tape()).data[0].labels, strict=True)
    )
    assert labels["encoder.0.block"] == "0.block"
    assert "encoder.0" not in labels


def test_the_menu_offers_what_occurs():
    labels = [button.label for button in layers_figure(small_tape()).layout.updatemenus[0].buttons]
    assert labels == ["everything", "activation", "parameter", "gradient", "optimizer state"]


def test_every_box_knows_its_layer():
    chart = layers_figure(training_tape()).data[0]
    known = set(analysis_tables.layers(training_tape()).index)
    assert {layer_of_box(box) for box in chart.ids} - {None} <= known


def test_a_module_name_is_no_html():
    tape = Tape.from_columns(
        {"address": [0], "size": [64], "category": [Category.PARAMETER], "module": [0]}, modules=["<b>x"], meta=CPU
    )
    assert layers_figure(tape).data[0].labels[1] == "&lt;b&gt;x"


# -- empty tapes


@pytest.mark.parametrize("draw", [timeline, layers_figure, static.svg, text.timeline_text, text.tensors_text])
def test_an_empty_tape_has_its_figures(draw):
    assert draw(small_tape()[:0])


# -- static picture


SVG = "{http://www.w3.org/2000/svg}"


def test_the_picture_is_well_formed_and_says_what_the_timeline_says():
    root = ET.fromstring(static.svg(training_tape()))
    words = [element.text for element in root.iter(f"{SVG}text")]
    assert words[0] == summary.sentence(training_tape()).splitlines()[0]
    for word in ("peak 3.21 GiB", "step 2", "backward", "activation", "reserved", "event", "allocated, predicted"):
        assert word in words


def test_the_picture_draws_an_area_for_each_category():
    root = ET.fromstring(static.svg(small_tape()))
    fills = [element.get("fill") for element in root.iter(f"{SVG}path") if element.get("fill") != "none"]
    kinds = [Category.PARAMETER, Category.OPTIMIZER_STATE, Category.GRADIENT, Category.ACTIVATION]
    kinds += [Category.INPUT, Category.TEMPORARY]
    assert fills[::-1] == [COLOURS[kind] for kind in kinds]


def test_the_top_area_reaches_the_peak():
    tape = small_tape()
    root = ET.fromstring(static.svg(tape))
    circle = next(root.iter(f"{SVG}circle"))
    top = next(element for element in root.iter(f"{SVG}path") if element.get("fill") != "none")
    heights = [float(number) for number in re.findall(r"[V ]([\d.]+)", top.get("d", ""))]
    assert min(heights) == float(circle.get("cy", "nan"))


def test_a_long_sentence_is_broken_into_lines():
    program = Program()
    program.alloc(100, Category.ACTIVATION, "op", ".".join(["module_with_a_long_name"] * 6), 3)
    root = ET.fromstring(static.svg(program.tape(), width=600))
    # 14 pixels bold are 7.6 pixels a letter: (600 - 16) / 7.6 = 76 letters
    assert all(len(element.text or "") <= 76 for element in root.iter(f"{SVG}text"))


def test_names_in_the_picture_are_escaped():
    program = Program()
    program.alloc(100, Category.ACTIVATION, "op", "<script>", 3)
    assert "<script>" not in static.svg(program.tape())


# -- text and tables


def test_timeline_in_text():
    assert text.timeline_text(small_tape()).splitlines()[3:] == [
        "parameter   400 B  53 %  ████████████▊",  # 400 / 750 of 24 letters = 12.8
        "activation  200 B  27 %  ██████▍",  # 6.4
        "input       100 B  13 %  ███▎",  # 3.2, in eighths 26 = 3 and 2
        "temporary    50 B   7 %  █▋",  # 1.6, in eighths 13 = 1 and 5
    ]


def test_layers_in_text_name_the_largest_first():
    assert text.layers_text(small_tape()).splitlines()[3] == "fc  920 B  mostly parameter  ████████████████████████"


def test_tensors_in_text():
    lines = text.tensors_text(small_tape(), count=2).splitlines()[3:]
    assert lines == ["400 B  parameter   fc  empty  train.py:3", "200 B  activation  fc  addmm  train.py:6"]


def test_tensors_table_sorts_by_bytes_and_escapes():
    program = Program()
    program.alloc(2048, Category.ACTIVATION, "<op>", "a&b", 3)
    table = tables.tensors_table(program.tape())
    assert 'data-value="2048">2.00 KiB' in table
    assert "<code>a&amp;b</code>" in table
    assert "&lt;op&gt;" in table


def test_categories_table_has_shares():
    # 400 / 750 = 53.3 %
    assert "53.3 %" in tables.categories_table(small_tape())
