"""Figures without a kernel: SVG image, text and HTML tables; figures of an empty tape."""

from __future__ import annotations

import dataclasses
import re
import xml.etree.ElementTree as ET

import numpy as np
import pytest

from memexplore.analysis.verdict_content import verdict_content
from memexplore.figures import static, tables, text
from memexplore.figures.layers import layers_tree
from memexplore.figures.palette import COLOURS
from memexplore.figures.timeline import hover_texts, timeline
from memexplore.tape import Action, Category, Meta, Phase, Source, Tape
from tests.sample_tapes import Program, small_tape, training_tape, unwound_tape

# -- empty tapes


@pytest.mark.parametrize("draw", [timeline, layers_tree, static.svg, text.timeline_text, text.tensors_text])
def test_empty_tape_has_figures(draw):
    assert draw(small_tape()[:0])


# -- static image


SVG = "{http://www.w3.org/2000/svg}"


def test_image_has_the_texts_of_the_timeline():
    root = ET.fromstring(static.svg(training_tape()))
    labels = [element.text for element in root.iter(f"{SVG}text")]
    assert labels[0] == verdict_content(training_tape()).headline
    for label in ("peak 3.21 GiB", "step 2", "backward", "activation", "reserved", "event", "allocated, predicted"):
        assert label in labels


def test_image_has_the_layers_at_the_peak():
    root = ET.fromstring(static.svg(small_tape()))
    labels = [element.text for element in root.iter(f"{SVG}text")]
    # 400 + 200 of fc, 50 of Net itself, 100 of the input
    start = labels.index("Layers at the peak") + 1
    assert labels[start:] == ["Net", "650 B", "fc", "600 B", "(itself)", "50 B", "not in a layer", "100 B"]


def test_image_says_how_many_layers_it_leaves_out(monkeypatch):
    monkeypatch.setattr(static, "_LAYERS", 2)
    root = ET.fromstring(static.svg(small_tape()))
    labels = [element.text for element in root.iter(f"{SVG}text")]
    start = labels.index("Layers at the peak") + 1
    assert labels[start:] == ["Net", "650 B", "fc", "600 B", "not shown: 2 smaller rows, up to 100 B"]


def test_image_of_a_run_that_did_not_fit_ends_with_the_request():
    root = ET.fromstring(static.svg(unwound_tape()))
    assert [element.get("id") for element in root.iter(f"{SVG}pattern")] == ["over"]
    labels = [element.text for element in root.iter(f"{SVG}text")]
    assert "out of memory: 4.00 GiB requested" in labels
    assert "requested" in labels  # what the hatching is
    assert "backward" not in labels


def test_image_names_the_hatching_over_the_capacity():
    small = small_tape()
    over = dataclasses.replace(small, meta=small.meta._replace(capacity=500))
    for tape, is_over in ((small, False), (over, True)):
        labels = [element.text for element in ET.fromstring(static.svg(tape)).iter(f"{SVG}text")]
        assert ("over capacity" in labels) is is_over


def test_text_alternative_has_the_peak_of_the_picture():
    whole = training_tape()
    assert 'peak 3.21 GiB"' in static.image(unwound_tape().replace(whole=whole))


def test_image_has_an_area_for_each_category():
    root = ET.fromstring(static.svg(small_tape()))
    fills = [element.get("fill") for element in root.iter(f"{SVG}path") if element.get("fill") != "none"]
    kinds = [Category.PARAMETER, Category.OPTIMIZER_STATE, Category.GRADIENT, Category.ACTIVATION]
    kinds += [Category.INPUT, Category.TEMPORARY]
    assert fills[::-1] == [COLOURS[kind] for kind in kinds]


def test_tape_on_which_layers_hold_nothing_has_an_image_without_layers():
    rows = {"action": [Action.MARK], "step": [1], "phase": [Phase.FORWARD]}
    tape = Tape.from_columns(rows, meta=Meta(Source.MEASURED, "cpu"), modules=["", "fc"])
    assert "Layers at the peak" not in static.svg(tape)


def test_top_area_reaches_the_peak():
    tape = small_tape()
    root = ET.fromstring(static.svg(tape))
    circle = next(root.iter(f"{SVG}circle"))
    top = next(element for element in root.iter(f"{SVG}path") if element.get("fill") != "none")
    heights = [float(number) for number in re.findall(r"[V ]([\d.]+)", top.get("d", ""))]
    assert min(heights) == float(circle.get("cy", "nan"))


def test_long_verdict_is_wrapped():
    program = Program()
    program.alloc(100, Category.ACTIVATION, "op", ".".join(["module_with_a_long_name"] * 6), 3)
    root = ET.fromstring(static.svg(program.tape(), width=600))
    # Letters are 7.6 pixels wide in bold and 6.4 in plain text: (600 - 16) / 7.6 = 76 and (600 - 16) / 6.4 = 91.
    widths = {"600": 76, None: 91}
    assert all(len(element.text or "") <= widths[element.get("font-weight")] for element in root.iter(f"{SVG}text"))


def test_names_in_the_image_are_escaped():
    program = Program()
    program.alloc(100, Category.ACTIVATION, "op", "<script>", 3)
    assert "<script>" not in static.svg(program.tape())


# -- text and tables


def test_timeline_as_text():
    assert text.timeline_text(small_tape()).splitlines()[3:] == [
        "parameter   400 B  53 %  ████████████▊",  # 400 / 750 of 24 letters = 12.8
        "activation  200 B  27 %  ██████▍",  # 6.4
        "input       100 B  13 %  ███▎",  # 3.2, in eighths 26 = 3 and 2
        "temporary    50 B   7 %  █▋",  # 1.6, in eighths 13 = 1 and 5
    ]


def test_layers_as_text_are_sorted_by_size():
    assert text.layers_text(small_tape()).splitlines()[3] == "fc  920 B  mostly parameter  ████████████████████████"


def test_tensors_as_text():
    lines = text.tensors_text(small_tape(), count=2).splitlines()[3:]
    assert lines == ["400 B  parameter   fc  empty  train.py:3", "200 B  activation  fc  addmm  train.py:6"]


def test_tensors_as_text_with_shapes():
    program = Program()
    program.alloc(400, Category.PARAMETER, "empty", "fc", 3, "float32[10, 10]")
    program.alloc(200, Category.WORKSPACE, "addmm", "fc", 3)
    lines = text.tensors_text(program.tape()).splitlines()[-2:]
    assert lines == [
        "400 B  parameter  float32[10, 10]  fc  empty  train.py:3",
        "200 B  workspace  –                fc  addmm  train.py:3",
    ]
    assert "<code>float32[10, 10]</code>" in tables.tensors_table(program.tape())


def test_hover_has_the_tensor_of_the_block():
    program = Program()
    program.free(program.alloc(400, Category.PARAMETER, "empty", "fc", 3, "float32[10, 10]"))
    assert all("<br>float32[10, 10]<br>" in hover for hover in hover_texts(program.tape(), np.arange(3)))


def test_tensors_table_has_bytes_as_sort_key_and_escapes_names():
    program = Program()
    program.alloc(2048, Category.ACTIVATION, "<op>", "a&b", 3)
    table = tables.tensors_table(program.tape())
    assert 'data-value="2048">2.00 KiB' in table
    assert "<code>a&amp;b</code>" in table
    assert "&lt;op&gt;" in table


def test_categories_table_has_shares():
    # 400 / 750 = 53.3 %
    assert "53.3 %" in tables.categories_table(small_tape())
