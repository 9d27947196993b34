"""Tree of layers as HTML."""

from __future__ import annotations

import re

from memexplore.figures.layers import layers_tree
from memexplore.tape import Category, Tape
from tests.sample_tapes import CPU, small_tape


def test_lines_have_sizes_at_the_peak():
    page = layers_tree(small_tape())
    labels = re.findall(r'<b style="padding-left:(\d)em" title="[^"]*">([^<]*)</b><u>([^<]*)</u>', page)
    # at the peak: 400 B of parameters and 200 B of activations in fc, 50 B of temporaries in Net, 100 B of input
    assert labels == [
        ("0", "Net", "650 B"),
        ("1", "fc", "600 B"),
        ("1", "(itself)", "50 B"),
        ("0", "not in a layer", "100 B"),
    ]


def test_bar_has_a_part_for_each_category():
    assert 'width:53.33%;background:#0072B2" title="400 B parameter"' in layers_tree(small_tape())  # 400 / 750


def test_name_of_a_layer_is_escaped():
    columns = {"address": [0], "size": [64], "category": [Category.PARAMETER], "module": [0]}
    assert "&lt;b&gt;x" in layers_tree(Tape.from_columns(columns, modules=["<b>x"], meta=CPU))
