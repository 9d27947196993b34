"""Layers of a tape as rows: what they hold after a row, their maxima, and the layers that share a row."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from memexplore.analysis import curves
from memexplore.analysis.layer_rows import ITSELF, LayerRow, held_layers, highest_layers
from memexplore.analysis.tables import NO_LAYER, module_parents
from memexplore.tape import Action, Category, Tape
from tests.sample_tapes import CPU, big_tape, small_tape, training_tape

BIG = big_tape(20_000)


def tape_of(*blocks: tuple[str, int], classes: dict[str, str] | None = None) -> Tape:
    """A tape of parameters of some layers."""
    names = list(dict.fromkeys(name for name, _ in blocks))
    columns = {
        "address": [512 * number for number in range(len(blocks))],
        "size": [size for _, size in blocks],
        "category": [Category.PARAMETER] * len(blocks),
        "module": [names.index(name) for name, _ in blocks],
    }
    kinds = [(classes or {}).get(name, "") for name in names] if classes else []
    return Tape.from_columns(columns, modules=names, classes=kinds, meta=CPU)


def shown(rows: tuple[LayerRow, ...]) -> list[tuple[str, int, int]]:
    return [(row.label, row.layers, row.total) for row in rows]


def test_rows_of_the_small_tape_at_its_peak():
    net, none = held_layers(small_tape(), 4)
    # 400 parameter + 200 activation in fc; 50 temporary in Net itself; 100 input in no layer
    assert shown((net, none)) == [("Net", 1, 650), (NO_LAYER, 1, 100)]
    assert shown(net.children) == [("fc", 1, 600), (ITSELF, 1, 50)]
    assert (net.sizes[Category.PARAMETER], net.sizes[Category.ACTIVATION], net.sizes[Category.TEMPORARY]) == (
        400,
        200,
        50,
    )


@settings(max_examples=30)
@given(st.integers(0, 19_999))
def test_rows_sum_to_the_allocated_bytes(row):
    assert sum(each.total for each in held_layers(BIG, row)) == curves.curve(BIG)[row]


@pytest.mark.parametrize("tape", [small_tape(), training_tape(), big_tape(5000)])
def test_children_and_members_sum_to_their_row(tape):
    def check(row: LayerRow) -> None:
        for inner in filter(None, (row.children, row.members)):
            assert np.array_equal(np.sum([each.sizes for each in inner], axis=0), row.sizes)
            for each in inner:
                check(each)

    for row in held_layers(tape, curves.peak(tape)[1]):
        check(row)


def test_maximum_of_a_layer_is_that_of_its_own_curve():
    tape = BIG
    sizes, life = curves.block_bytes(tape), curves.lifetimes(tape)
    inside = {name for name in module_parents(tape.modules) if name == "layer3" or name.startswith("layer3.")}
    of_layer = np.array([tape.modules[number] in inside for number in tape.module[life.born].tolist()])
    change = np.zeros(len(tape) + 1, dtype=np.int64)
    np.add.at(change, life.born[of_layer], sizes[life.born[of_layer]])
    np.add.at(change, life.requested[of_layer], -sizes[life.born[of_layer]])
    net = highest_layers(tape)[0]
    assert next(row.total for row in net.children if row.label == "layer3") == np.cumsum(change).max()


def test_maximum_counts_a_block_that_takes_the_place_of_another():
    columns = {
        "action": [Action.ALLOC, Action.FREE_REQUESTED, Action.ALLOC],
        "address": [0, 0, 0],
        "size": [10, 10, 30],
        "module": [0, 0, 0],
    }
    assert shown(highest_layers(Tape.from_columns(columns, modules=["Net"], meta=CPU)))[0] == ("Net", 1, 30)


def test_equal_numbered_layers_share_a_row():
    blocks = [(f"h.{number}.{part}", size) for number in range(3) for part, size in (("attn", 10), ("mlp", 20))]
    net = held_layers(tape_of(("Net", 1), *blocks), 6)[0]
    group = net.children[0]
    assert (group.name, group.label, group.layers, group.smallest, group.largest) == ("h.0–2", "h", 3, 30, 30)
    assert [(row.name, row.total) for row in group.children] == [("h.0–2.attn", 30), ("h.0–2.mlp", 60)]
    assert [(row.name, row.total) for row in group.members] == [("h.0", 30), ("h.1", 30), ("h.2", 30)]


def test_part_that_allocates_in_one_of_several_equal_layers_has_a_row():
    names = {"Net": "Net", "h.0": "Block", "h.0.act": "GELU", "h.1": "Block", "h.1.act": "GELU"}
    columns = {
        "address": [0, 512, 1024],
        "size": [10, 10, 5],
        "category": [Category.ACTIVATION] * 3,
        "module": [list(names).index(name) for name in ("h.0", "h.1", "h.1.act")],
    }
    tape = Tape.from_columns(columns, modules=list(names), classes=list(names.values()), meta=CPU)
    (blocks,) = held_layers(tape, 2)[0].children
    # 10 in each block itself, and 5 in the activation of the second
    assert (blocks.layers, blocks.total) == (2, 25)
    assert shown(blocks.children) == [("act", 2, 5), (ITSELF, 2, 20)]


def test_layers_of_other_sizes_have_their_own_rows():
    net = held_layers(tape_of(("Net", 1), ("0", 10), ("1", 20), ("2", 20)), 3)[0]
    assert [(row.name, row.layers) for row in net.children] == [("0", 1), ("1–2", 2), ("Net", 1)]


def test_layers_of_other_classes_have_their_own_rows():
    classes = {"Net": "Net", "0": "Linear", "1": "Bilinear"}
    net = held_layers(tape_of(("Net", 1), ("0", 10), ("1", 10), classes=classes), 2)[0]
    assert [(row.name, row.kind) for row in net.children] == [("0", "Linear"), ("1", "Bilinear"), ("Net", "")]


def test_layer_that_only_holds_another_has_no_row():
    net = held_layers(tape_of(("Net", 1), ("mlp.act", 10)), 1)[0]
    assert [(row.name, row.label) for row in net.children] == [("mlp.act", "mlp.act"), ("Net", ITSELF)]


def test_layers_of_a_second_model_are_below_it():
    first, second, *_ = held_layers(tape_of(("Net", 1), ("fc", 2), ("Net#2", 3), ("Net#2.fc", 4)), 3)
    assert shown(first.children) == [("fc", 1, 2), (ITSELF, 1, 1)]
    assert shown(second.children) == [("fc", 1, 4), (ITSELF, 1, 3)]


def test_row_of_an_empty_tape_has_no_layers():
    assert held_layers(small_tape()[:0], -1) == ()
