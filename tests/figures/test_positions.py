"""Places of rows on the horizontal axis of a timeline, and labels that do not overlap."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from memexplore.figures.labels import Box, Label, Spot, box_of, placed
from memexplore.figures.positions import (
    EqualSteps,
    XAxis,
    XChoice,
    axis_ticks,
    equal_steps,
    has_clock,
    layer_visits,
    positions,
)
from memexplore.figures.scale import scale
from memexplore.figures.timeline import OVER_CAPACITY, hover_texts, timeline, timeline_arrays
from memexplore.figures.timeline_layout import HEIGHT, MARGINS, Plot, plot_labels, shown_bands, window_layout
from memexplore.tape import Category, Ending, Phase, Source, Tape
from tests.sample_tapes import GIB, T4, Program, big_tape, oom_tape, small_tape, training_tape

CHOICES = [XChoice(axis, equal) for axis in XAxis for equal in EqualSteps]


def steps_of(sizes: list[int], *, leak: int = 0) -> Tape:
    """Steps that allocate and free one block each; `leak` bytes stay after each step."""
    program = Program()
    program.alloc(512, Category.PARAMETER)
    for step, size in enumerate(sizes, start=1):
        program.mark(step, Phase.FORWARD)
        program.free(program.alloc(size, Category.ACTIVATION, "mm", "fc", 3))
        if leak:
            program.alloc(leak, Category.ACTIVATION, "mm", "fc", 4)
    return program.tape()


def test_set_up_takes_a_twentieth() -> None:
    tape = training_tape(steps=1, depth=2)
    first = int(np.flatnonzero(tape.step)[0])
    assert first > len(tape) / 20
    x = positions(tape).x([0, first, len(tape) - 1])
    assert x[1] / x[2] == pytest.approx(1 / 20)


def test_short_set_up_keeps_its_width() -> None:
    tape = steps_of([8] * 2 + [16] * 40)
    assert positions(tape, XChoice(equal=EqualSteps.APART)).x([0, 1, 50]).tolist() == [0, 1, 50]


def test_equal_steps_share_the_place_of_the_first() -> None:
    tape = steps_of([8, 16, 16, 16, 16, 8])
    (fold,) = equal_steps(tape)
    assert fold.text == "steps 2–5 alike ×4"
    # a mark, an alloc and two rows of a free in each of the steps after the row of set-up
    assert (fold.row, fold.hidden) == (5, (9, 21))
    x = positions(tape).x([5, 8, 20, 21])
    assert x[1] == x[2]
    assert x[3] - x[2] == 1


def test_steps_that_grow_are_not_alike() -> None:
    assert equal_steps(steps_of([16] * 6, leak=512)) == ()


def test_two_equal_steps_are_not_folded() -> None:
    assert equal_steps(steps_of([8, 16, 16])) == ()


def test_hidden_rows_are_not_drawn_and_the_label_counts_the_steps() -> None:
    tape = steps_of([8, 16, 16, 16, 16, 8])
    places = positions(tape)
    assert timeline_arrays(tape, places=places)["row"].tolist() == [*range(9), *range(21, 25)]
    plot = Plot(tape, 0, len(tape) - 1, places, 1000, 300, 1.0)
    assert [band.text for band in shown_bands(plot)[0]] == ["set-up", "step 1", "steps 2–5 alike ×4", "step 6"]


@pytest.mark.parametrize("choice", CHOICES)
@pytest.mark.parametrize("tape", [small_tape(), training_tape(), big_tape(5000), oom_tape(), small_tape()[:0]])
def test_places_rise_with_the_rows(tape: Tape, choice: XChoice) -> None:
    x = positions(tape, choice).x(np.arange(len(tape)))
    assert np.all(np.diff(x) >= -1e-9)
    assert timeline(tape, x=choice).data


def test_layers_have_equal_widths() -> None:
    program = Program()
    program.mark(1, Phase.FORWARD)
    for _ in range(3):
        program.alloc(8, Category.ACTIVATION, "mm", "first", 3)
    program.alloc(8, Category.ACTIVATION, "mm", "second", 3)
    program.alloc(8, Category.ACTIVATION, "mm", "third", 3)
    tape = program.tape()
    assert layer_visits(tape).tolist() == [0, 4, 5]
    assert positions(tape, XChoice(XAxis.LAYER)).x([0, 4, 5]).round(9).tolist() == [0, 1, 2]


def test_prediction_has_no_clock() -> None:
    tape = small_tape().replace(time=np.arange(15) * 1_000_000)
    assert has_clock(tape)
    assert positions(tape, XChoice(XAxis.TIME)).choice.axis is XAxis.TIME
    predicted = tape.replace(meta=tape.meta._replace(source=Source.PREDICTED))
    assert positions(predicted, XChoice(XAxis.TIME)).choice.axis is XAxis.EVENT
    assert len(hover_texts(predicted, np.array([3]))) == 1


# -- labels


SPOT = st.builds(Spot, st.floats(0, 600), st.floats(0, 300), st.sampled_from(["left", "center", "right"]))


@given(st.lists(st.lists(SPOT, min_size=1, max_size=5), max_size=4))
def test_label_takes_one_of_its_places(spots) -> None:
    labels = [Label("text", tuple(candidates)) for candidates in spots]
    assert all(spot in label.spots for spot, label in zip(placed(labels, 600, 300), labels, strict=True))


@pytest.mark.parametrize("width", [500, 640, 800, 1000, 1400])
@pytest.mark.parametrize("ratio", [0.9, 0.99, 1.0, 1.01, 1.1, 2, 5])
@pytest.mark.parametrize("fits", [True, False])
def test_labels_do_not_overlap(width: int, ratio: float, fits: bool) -> None:
    tape = training_tape(steps=2) if fits else oom_tape()
    peak = max(scale(tape).highest, 1)
    tape = tape.replace(meta=tape.meta._replace(capacity=int(peak * ratio)))
    heights = scale(tape)
    inner = width - MARGINS["l"] - MARGINS["r"], HEIGHT - MARGINS["t"] - MARGINS["b"] - 20
    plot = Plot(tape, 0, len(tape) - 1, positions(tape), *inner, heights.ceiling * 1.2)
    boxes = [box_of(each.label, each.spot) for each in plot_labels(plot, heights)]
    assert len(boxes) == (2 if fits else 3)
    if heights.capacity is not None:
        line = plot.y(heights.capacity)
        assert boxes[0].overlap(Box(0, line - 1, inner[0], line + 1)) == 0  # of the label of the peak
    assert all(one.overlap(other) == 0 for one, other in itertools.combinations(boxes, 2))
    assert all(box.overlap(Box(0, 0, *inner)) > 0.99 * box.overlap(box) for box in boxes)


def test_vertical_axis_follows_the_window() -> None:
    tape = training_tape(steps=2)
    whole, part = (window_layout(tape, window)["yaxis"]["range"][1] for window in (None, (0, 20)))
    assert part < whole / 10


def test_what_is_over_the_capacity_is_hatched() -> None:
    program = Program()
    program.mark(1, Phase.FORWARD)
    program.alloc(GIB, Category.ACTIVATION, "mm", "fc", 3)
    program.alloc(2 * GIB, Category.ACTIVATION, "mm", "fc", 3)
    tape = program.tape(T4._replace(capacity=2 * GIB, ending=Ending.OUT_OF_MEMORY))
    over = next(trace for trace in timeline(tape).data if trace.name == OVER_CAPACITY)
    assert over.fillpattern.shape == "/"
    # nothing, 1 GiB, and 3 GiB allocated under a capacity of 2 GiB
    assert list(over.y) == [0, 0, GIB]


def test_layer_names_are_not_read_as_html() -> None:
    program = Program()
    program.mark(1, Phase.FORWARD)
    for layer in ("a", "<b>fc</b>", "c"):
        program.alloc(GIB, Category.ACTIVATION, "mm", layer, 3)
    tape = program.tape()
    ticks = axis_ticks(tape, positions(tape, XChoice(XAxis.LAYER)), 0, len(tape) - 1, 1000)
    assert ticks is not None
    assert "&lt;b&gt;fc&lt;/b&gt;" in ticks["ticktext"]
