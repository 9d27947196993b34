"""The heat map of layers × steps."""

from __future__ import annotations

import numpy as np

from memexplore.figures.layer_history import MOST_LAYERS, layer_history


def test_cells_have_the_bytes_and_the_step():
    figure = layer_history(np.array([[1, 2], [3, 4]]), ["a", "b"], [10, 500])
    heat = figure.data[0]
    assert heat.z.tolist() == [[1, 2], [3, 4]]
    assert heat.customdata.tolist() == [[10, 500], [10, 500]]
    assert list(heat.y) == ["a", "b"]


def test_of_many_layers_the_largest_have_rows_and_the_rest_is_one_sum():
    count = MOST_LAYERS + 10
    sizes = np.arange(count)[::-1].reshape(count, 1)  # the first layers are the largest
    figure = layer_history(sizes, [f"layer{number}" for number in range(count)], [1])
    heat = figure.data[0]
    # 39 rows of their own, and the 11 smallest: 10 + 9 + ... + 0 = 55
    assert len(heat.y) == MOST_LAYERS
    assert (heat.y[0], heat.y[-1], heat.z[-1, 0]) == ("layer0", "11 other layers", 55)


def test_names_of_layers_are_text():
    assert layer_history(np.array([[1]]), ["<lambda>"], [1]).data[0].y[0] == "&lt;lambda&gt;"


def test_steps_are_columns_of_equal_width_with_their_numbers_as_ticks():
    figure = layer_history(np.ones((1, 3), dtype=np.int64), ["a"], [1, 2, 9000])
    assert list(figure.data[0].x) == [0, 1, 2]
    assert list(figure.layout.xaxis.ticktext) == ["1", "2", "9,000"]


def test_zeros_have_a_figure():
    assert layer_history(np.zeros((1, 1), dtype=np.int64), ["a"], [1]).data[0].zmax == 1
