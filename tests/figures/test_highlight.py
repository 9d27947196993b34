"""Bytes of one layer along the timeline."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from memexplore.analysis import curves
from memexplore.analysis.tables import NO_LAYER
from memexplore.figures.highlight import highlight, layer_arrays
from memexplore.figures.timeline import timeline_traces
from memexplore.tape import Category
from tests.sample_tapes import small_tape, training_tape


def test_layer_arrays_of_a_layer_by_category() -> None:
    arrays = layer_arrays(small_tape(), "fc", np.arange(15.0))
    # weight 400 from row 0; activation 200 in rows 3 to 7; gradient 240 from row 10; state 80 in row 14
    assert arrays[Category.PARAMETER].tolist() == [400] * 15
    assert arrays[Category.ACTIVATION].tolist() == [0] * 3 + [200] * 5 + [0] * 7
    assert arrays[Category.GRADIENT].tolist() == [0] * 10 + [240] * 5
    assert arrays[Category.OPTIMIZER_STATE].tolist() == [0] * 14 + [80]
    assert set(arrays) == {Category.PARAMETER, Category.ACTIVATION, Category.GRADIENT, Category.OPTIMIZER_STATE}


def test_root_and_no_layer_sum_to_allocated() -> None:
    tape = training_tape()
    rows = np.arange(float(len(tape)))
    parts = [layer_arrays(tape, name, rows) for name in ("UNet", NO_LAYER)]
    total = sum(sizes for part in parts for sizes in part.values())
    assert np.array_equal(total, curves.curve(tape, "allocated"))


def test_legend_has_each_category_once() -> None:
    traces = highlight(timeline_traces(small_tape()), small_tape(), "fc")
    legend = [trace["name"] for trace in traces if trace.get("showlegend") is not False]
    assert len(legend) == len(set(legend))
    assert {"activation", "input", "temporary"} < set(legend)


def test_memory_over_the_capacity_is_hatched_in_front_of_the_layer() -> None:
    small = small_tape()
    tape = dataclasses.replace(small, meta=small.meta._replace(capacity=500))
    names = [trace["name"] for trace in highlight(timeline_traces(tape), tape, "fc")]
    layer = max(number for number, name in enumerate(names) if name == "activation")
    assert layer < names.index("over capacity") < names.index("reserved")


def test_unknown_layer_raises() -> None:
    with pytest.raises(ValueError, match="no layer 'conv'"):
        highlight(timeline_traces(small_tape()), small_tape(), "conv")
