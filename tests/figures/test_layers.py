"""Icicle of the layers of a tape."""

from __future__ import annotations

from memexplore.analysis import tables as analysis_tables
from memexplore.figures.layers import ROOT, layer_of_box, layers_figure
from memexplore.tape import Category, Tape
from tests.sample_tapes import CPU, small_tape, training_tape


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


def test_box_is_at_least_as_large_as_its_children():
    figure = layers_figure(training_tape())
    for button in figure.layout.updatemenus[0].buttons:
        chart = {key: values[0] for key, values in button.args[0].items()}
        inside = dict.fromkeys(chart["ids"], 0)
        for parent, value in zip(chart["parents"], chart["values"], strict=True):
            if parent:
                inside[parent] += value
        assert all(inside[name] <= value for name, value in zip(chart["ids"], chart["values"], strict=True))
        assert len(set(chart["ids"])) == len(chart["ids"])


def test_module_with_a_single_child_has_no_box():
    labels = dict(
        zip(layers_figure(training_tape()).data[0].ids, layers_figure(training_tape()).data[0].labels, strict=True)
    )
    assert labels["encoder.0.block"] == "0.block"
    assert "encoder.0" not in labels


def test_buttons_offer_the_categories_of_the_tape():
    labels = [button.label for button in layers_figure(small_tape()).layout.updatemenus[0].buttons]
    assert labels == ["everything", "activation", "parameter", "gradient", "optimizer state"]


def test_layer_of_every_box_is_in_the_table():
    chart = layers_figure(training_tape()).data[0]
    layers = set(analysis_tables.layers(training_tape()).index)
    assert {layer_of_box(box) for box in chart.ids} - {None} <= layers


def test_module_name_is_escaped():
    tape = Tape.from_columns(
        {"address": [0], "size": [64], "category": [Category.PARAMETER], "module": [0]}, modules=["<b>x"], meta=CPU
    )
    assert layers_figure(tape).data[0].labels[1] == "&lt;b&gt;x"
