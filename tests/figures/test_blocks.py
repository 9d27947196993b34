"""The address map: segments, blocks and gaps at a moment, in numbers, words and as a figure."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from memexplore.allocator import Settings, replay
from memexplore.analysis import curves
from memexplore.analysis.addresses import address_map, fragmentation, fragmentation_text, gaps
from memexplore.figures.blocks import FREE, MAX_LINES, blocks_figure
from memexplore.tape import Category, Meta, Source, Tape
from tests.sample_tapes import MIB, Program, small_tape, training_tape

GPU = Meta(Source.PREDICTED, "cuda:0")


def two_segments() -> Tape:
    """Two requests of 700 B in a small segment of 2 MiB, the first given back, and one of 12 MiB in its own segment."""
    program = Program()
    first = program.alloc(700, Category.PARAMETER, "empty", "fc", 3)
    program.alloc(700, Category.GRADIENT, "mm", "conv", 4)
    program.alloc(12 * MIB, Category.ACTIVATION, "mm", "conv", 5)
    program.free(first)
    return replay(program.tape(GPU))


def last(tape: Tape) -> int:
    return len(tape) - 1


def test_segments_and_blocks_have_their_addresses() -> None:
    tape = two_segments()
    shown = address_map(tape, last(tape))
    assert sorted(shown.length.tolist()) == [2 * MIB, 12 * MIB]
    # 700 bytes are two units of 512; the first of them is free again
    assert sorted(shown.size.tolist()) == [1024, 12 * MIB]
    assert (shown.address - shown.start[shown.segment]).tolist() == [1024, 0]


def test_fragmentation_adds_up_to_what_is_reserved() -> None:
    tape = two_segments()
    told = fragmentation(tape, last(tape))
    assert told.allocated == 1024 + 12 * MIB
    assert told.internal == 1024 - 700
    # in the small segment the first 1024 bytes, and all behind the second block
    assert told.external == 2 * MIB - 1024
    assert told.largest == 2 * MIB - 2048
    assert told.reserved == 14 * MIB == told.allocated + told.external
    assert told.releasable == 0


def test_a_free_segment_could_be_released() -> None:
    program = Program()
    program.free(program.alloc(12 * MIB, Category.ACTIVATION))
    tape = replay(program.tape(GPU))
    assert fragmentation(tape, last(tape)).releasable == 12 * MIB
    assert "empty_cache could release 12.0 MiB" in fragmentation_text(tape, last(tape))


def test_of_an_expandable_segment_whole_pages_could_be_released() -> None:
    program = Program()
    program.alloc(5 * MIB, Category.PARAMETER)
    program.free(program.alloc(50 * MIB, Category.ACTIVATION))
    tape = replay(program.tape(GPU), Settings.parse("expandable_segments:True"))
    # 5 + 50 MiB need three pages of 20 MiB; the block of 5 MiB keeps the first
    assert fragmentation(tape, last(tape)).reserved == 60 * MIB
    assert fragmentation(tape, last(tape)).releasable == 40 * MIB


def test_a_block_that_waits_for_another_stream_is_told() -> None:
    tape = two_segments()
    # the row between the request of the free and its completion
    told = fragmentation(tape, last(tape) - 1)
    assert told.waiting == 1024
    assert ", 1.00 KiB wait for another stream;" in fragmentation_text(tape, last(tape) - 1)


@given(st.data())
def test_blocks_and_gaps_fill_the_segments(data: st.DataObject) -> None:
    program = Program()
    sizes = st.integers(1, 30 * MIB)
    for _ in range(data.draw(st.integers(1, 30))):
        if program.held and data.draw(st.booleans()):
            program.free(data.draw(st.sampled_from(sorted(program.held))))
        else:
            program.alloc(data.draw(sizes), Category.ACTIVATION)
    expandable = data.draw(st.booleans())
    tape = replay(program.tape(GPU), Settings(expandable_segments=expandable))
    row = data.draw(st.integers(0, last(tape)))
    told, shown = fragmentation(tape, row), address_map(tape, row)
    assert told.reserved == curves.curve(tape, "reserved")[row]
    assert told.allocated == curves.curve(tape, "allocated")[row]
    assert told.allocated + told.waiting == curves.curve(tape, "active")[row]
    assert told.allocated + told.waiting + told.external == told.reserved
    begins, lengths, _ = gaps(shown)
    starts = [*begins.tolist(), *shown.address.tolist()]
    spans = sorted(zip(starts, [*lengths.tolist(), *shown.size.tolist()], strict=True))
    assert all(left + size <= right for (left, size), (right, _) in itertools.pairwise(spans))
    assert (shown.segment >= 0).all()


def test_the_figure_has_a_row_a_segment_and_a_colour_a_category() -> None:
    figure = blocks_figure(two_segments(), last(two_segments()))
    assert [trace.name for trace in figure.data] == [FREE, "gradient", "activation"]
    assert sorted(figure.data[0].x) == [2 * MIB, 12 * MIB]
    (gradient,) = (trace for trace in figure.data if trace.name == "gradient")
    assert (gradient.base[0], gradient.x[0]) == (1024, 1024)
    assert gradient.text[0].startswith(
        "<b>1.00 KiB gradient</b><br>700 B requested<br>layer: conv<br>op: mm<br>train.py:4"
    )


def test_every_allocated_byte_is_drawn() -> None:
    tape = training_tape()
    size, row = curves.peak(tape)
    figure = blocks_figure(tape)
    assert sum(int(np.sum(trace.x)) for trace in figure.data[1:]) == size
    assert int(np.sum(figure.data[0].x)) == curves.curve(tape, "reserved")[row]


def many_segments(count: int) -> Tape:
    """As many segments of 12 MiB, each full with one block."""
    program = Program()
    for _ in range(count):
        program.alloc(12 * MIB, Category.ACTIVATION)
    return replay(program.tape(GPU))


@pytest.mark.parametrize("count", [MAX_LINES, 1400])
def test_many_segments_share_rows_and_do_not_overlap(count: int) -> None:
    (free, _) = blocks_figure(many_segments(count)).data
    assert len(free.x) == count
    assert max(free.y) < MAX_LINES + 2
    spans = sorted(zip(free.y, free.base, free.x, strict=True))
    assert all(
        line < below or begin + size <= after for (line, begin, size), (below, after, _) in itertools.pairwise(spans)
    )


def test_blocks_too_small_to_be_seen_are_drawn_as_one() -> None:
    program = Program()
    program.alloc(12 * MIB, Category.PARAMETER)
    for _ in range(3000):
        program.alloc(500, Category.ACTIVATION)
    figure = blocks_figure(replay(program.tape(GPU)))
    (activations,) = (trace for trace in figure.data if trace.name == "activation")
    assert len(activations.x) < 1300
    assert sum(activations.x) == 3000 * 512
    assert "activation blocks</b>" in activations.text[0]


def test_a_layer_is_lit_and_the_rest_is_pale() -> None:
    figure = blocks_figure(two_segments(), last(two_segments()), layer="conv")
    assert [list(trace.marker.opacity) for trace in figure.data[1:]] == [[1.0], [1.0]]
    figure = blocks_figure(two_segments(), last(two_segments()), layer="fc")
    assert [list(trace.marker.opacity) for trace in figure.data[1:]] == [[0.2], [0.2]]


def test_a_layer_that_is_not_there_is_an_error() -> None:
    with pytest.raises(ValueError, match="no layer 'linear'"):
        blocks_figure(two_segments(), layer="linear")


@pytest.mark.parametrize("row", [-1, 10_000])
def test_a_row_that_is_not_there_is_an_error(row: int) -> None:
    with pytest.raises(IndexError, match="outside this tape"):
        address_map(two_segments(), row)


def test_a_cpu_has_no_segments_and_says_so() -> None:
    (note,) = blocks_figure(small_tape()).layout.annotations
    assert note.text.startswith("No segments")
    assert fragmentation_text(small_tape(), 0) == "No memory is reserved: the allocator holds no segment."


def test_an_empty_tape_has_an_empty_figure() -> None:
    assert len(blocks_figure(Tape.from_columns({"action": np.array([], dtype=int)}, meta=GPU)).data) == 0
