"""The history of a watched run as a figure: its curves, bands, marks and axis."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from memexplore.figures.history import CURVES, SYMBOLS, history_figure

MIB = 1 << 20


def columns(peaks: list[float], **more: list[float]) -> dict[str, Any]:
    """Columns of single steps from 1 on: what remains is half the peak, and twice the peak is reserved."""
    steps = np.arange(1, len(peaks) + 1, dtype=np.float64)
    values = np.array(peaks, dtype=np.float64)
    made = {"first": steps, "last": steps}
    for name, factor in (("peak", 1.0), ("peak_reserved", 2.0), ("after", 0.5)):
        made |= {name + suffix: factor * values for suffix in ("", "_low", "_high")}
    return made | {name: np.array(column) for name, column in more.items()}


def trace(figure: Any, name: str) -> Any:
    return next(each for each in figure.data if each.name == name)


def test_each_curve_has_a_line_and_a_band():
    figure = history_figure(columns([MIB, 3 * MIB], peak_low=[MIB, 2 * MIB], peak_high=[MIB, 4 * MIB]))
    assert list(trace(figure, "peak").y) == [MIB, 3 * MIB]
    # along the maxima, and back along the minima
    assert list(trace(figure, "peak range").y) == [MIB, 4 * MIB, 2 * MIB, MIB]
    assert list(trace(figure, "reserved").y) == [2 * MIB, 6 * MIB]


def test_a_bin_stands_at_the_middle_of_its_steps():
    figure = history_figure(columns([MIB]) | {"first": np.array([11.0]), "last": np.array([20.0])})
    assert list(trace(figure, "peak").x) == [15.5]


def test_marks_stand_at_the_peak_and_unmarked_kinds_are_not_in_the_legend():
    figure = history_figure(columns([MIB, 3 * MIB]), [{"step": 2, "kind": "rise", "text": "larger <batch>"}])
    rise = trace(figure, SYMBOLS["rise"][2])
    assert (list(rise.x), list(rise.y), list(rise.text)) == ([2], [3 * MIB], ["step 2: larger &lt;batch&gt;"])
    assert rise.showlegend
    assert not trace(figure, SYMBOLS["skipped"][2]).showlegend


def test_a_mark_of_the_first_step_is_whole_and_beside_the_numbers_of_the_axis():
    figure = history_figure(columns([MIB, MIB]), [{"step": 1, "kind": "rise", "text": "first step"}])
    rise = trace(figure, SYMBOLS["rise"][2])
    assert rise.cliponaxis is False
    assert figure.layout.yaxis.ticklabelstandoff > rise.marker.size / 2 + rise.marker.line.width / 2


@pytest.mark.parametrize(("capacity", "drawn"), [(5 * MIB, True), (6 * MIB, False)])
def test_a_capacity_far_above_the_curves_is_not_drawn(capacity: int, drawn: bool):
    # 2.5 times the highest curve, which is 2 MiB reserved, are 5 MiB
    figure = history_figure(columns([MIB]), capacity=capacity)
    assert bool(figure.layout.shapes) is drawn


def test_axis_starts_at_zero_and_leaves_room_above_the_highest_curve():
    figure = history_figure(columns([10 * MIB]))
    # the highest curve is reserved: 2 × 10 MiB, and 1.2 times that is the top
    assert figure.layout.yaxis.range == (0, 24 * MIB)


def test_without_steps_there_is_an_empty_figure_with_all_traces():
    figure = history_figure(columns([]))
    assert len(figure.data) == 2 * len(CURVES) + len(SYMBOLS)
    assert all(not len(each.x) for each in figure.data)


def test_numbers_that_a_device_does_not_count_are_left_out():
    figure = history_figure(columns([MIB], peak_reserved=[np.nan], peak_reserved_high=[np.nan]))
    assert figure.layout.yaxis.range == (0, 1.2 * MIB)
