"""Address map of a tape after one row: segments, blocks, gaps and fragmentation, as numbers, text and figure."""

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
    """Two requests of 700 B in a small segment of 2 MiB, the first freed, and one of 12 MiB in its own segment."""
    program = Program()
    first = program.alloc(700, Category.PARAMETER, "empty", "fc", 3)
    program.alloc(700, Category.GRADIENT, "mm", "conv", 4, "float32[175]")
    program.alloc(12 * MIB, Category.ACTIVATION, "mm", "conv", 5)
    program.free(first)
    return replay(program.tape(GPU))


def last(tape: Tape) -> int:
    return len(tape) - 1


def test_address_map_has_segments_and_blocks() -> None:
    tape = two_segments()
    addresses = address_map(tape, last(tape))
    assert sorted(addresses.length.tolist()) == [2 * MIB, 12 * MIB]
    # 700 bytes take two units of 512; the first block is free again
    assert sorted(addresses.size.tolist()) == [1024, 12 * MIB]
    assert (addresses.address - addresses.start[addresses.segment]).tolist() == [1024, 0]


def test_allocated_and_external_fragmentation_sum_to_reserved() -> None:
    tape = two_segments()
    result = fragmentation(tape, last(tape))
    assert result.allocated == 1024 + 12 * MIB
    assert result.internal == 1024 - 700
    # in the small segment the first 1024 bytes, and all after the second block
    assert result.external == 2 * MIB - 1024
    assert result.largest == 2 * MIB - 2048
    assert result.reserved == 14 * MIB == result.allocated + result.external
    assert result.releasable == 0


def test_free_segment_is_releasable() -> None:
    program = Program()
    program.free(program.alloc(12 * MIB, Category.ACTIVATION))
    tape = replay(program.tape(GPU))
    assert fragmentation(tape, last(tape)).releasable == 12 * MIB
    assert "empty_cache could release 12.0 MiB" in fragmentation_text(tape, last(tape))


def test_whole_pages_of_an_expandable_segment_are_releasable() -> None:
    program = Program()
    program.alloc(5 * MIB, Category.PARAMETER)
    program.free(program.alloc(50 * MIB, Category.ACTIVATION))
    tape = replay(program.tape(GPU), Settings.parse("expandable_segments:True"))
    # 5 + 50 MiB need three pages of 20 MiB; the block of 5 MiB keeps the first
    assert fragmentation(tape, last(tape)).reserved == 60 * MIB
    assert fragmentation(tape, last(tape)).releasable == 40 * MIB


def test_block_waiting_for_another_stream_is_counted() -> None:
    tape = two_segments()
    # the row between free_requested and free_completed
    result = fragmentation(tape, last(tape) - 1)
    assert result.waiting == 1024
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
    result, addresses = fragmentation(tape, row), address_map(tape, row)
    assert result.reserved == curves.curve(tape, "reserved")[row]
    assert result.allocated == curves.curve(tape, "allocated")[row]
    assert result.allocated + result.waiting == curves.curve(tape, "active")[row]
    assert result.allocated + result.waiting + result.external == result.reserved
    starts, lengths, _ = gaps(addresses)
    starts = [*starts.tolist(), *addresses.address.tolist()]
    ranges = sorted(zip(starts, [*lengths.tolist(), *addresses.size.tolist()], strict=True))
    assert all(left + size <= right for (left, size), (right, _) in itertools.pairwise(ranges))
    assert (addresses.segment >= 0).all()


def test_figure_has_a_line_per_segment_and_a_trace_per_category() -> None:
    figure = blocks_figure(two_segments(), last(two_segments()))
    assert [trace.name for trace in figure.data] == [FREE, "gradient", "activation"]
    assert sorted(figure.data[0].x) == [2 * MIB, 12 * MIB]
    (gradient,) = (trace for trace in figure.data if trace.name == "gradient")
    assert (gradient.base[0], gradient.x[0]) == (1024, 1024)
    assert gradient.text[0].startswith(
        "<b>1.00 KiB gradient</b><br>700 B requested<br>float32[175]<br>layer: conv<br>op: mm<br>train.py:4"
    )


def test_every_allocated_byte_is_drawn() -> None:
    tape = training_tape()
    size, row = curves.peak(tape)
    figure = blocks_figure(tape)
    assert sum(int(np.sum(trace.x)) for trace in figure.data[1:]) == size
    assert int(np.sum(figure.data[0].x)) == curves.curve(tape, "reserved")[row]


def many_segments(count: int) -> Tape:
    """Return a tape with `count` segments of 12 MiB, each filled by one block."""
    program = Program()
    for _ in range(count):
        program.alloc(12 * MIB, Category.ACTIVATION)
    return replay(program.tape(GPU))


@pytest.mark.parametrize("count", [MAX_LINES, 1400])
def test_many_segments_share_lines_without_overlap(count: int) -> None:
    (free, _) = blocks_figure(many_segments(count)).data
    assert len(free.x) == count
    assert max(free.y) < MAX_LINES + 2
    ranges = sorted(zip(free.y, free.base, free.x, strict=True))
    assert all(
        line < below or begin + size <= after for (line, begin, size), (below, after, _) in itertools.pairwise(ranges)
    )


def test_narrow_blocks_are_drawn_as_one_bar() -> None:
    program = Program()
    program.alloc(12 * MIB, Category.PARAMETER)
    for _ in range(3000):
        program.alloc(500, Category.ACTIVATION)
    figure = blocks_figure(replay(program.tape(GPU)))
    (activations,) = (trace for trace in figure.data if trace.name == "activation")
    assert len(activations.x) < 1300
    assert sum(activations.x) == 3000 * 512
    assert "activation blocks</b>" in activations.text[0]


def test_selected_layer_has_full_colour_and_others_are_pale() -> None:
    figure = blocks_figure(two_segments(), last(two_segments()), layer="conv")
    assert [list(trace.marker.opacity) for trace in figure.data[1:]] == [[1.0], [1.0]]
    figure = blocks_figure(two_segments(), last(two_segments()), layer="fc")
    assert [list(trace.marker.opacity) for trace in figure.data[1:]] == [[0.2], [0.2]]


def test_unknown_layer_raises() -> None:
    with pytest.raises(ValueError, match="no layer 'linear'"):
        blocks_figure(two_segments(), layer="linear")


@pytest.mark.parametrize("row", [-1, 10_000])
def test_row_outside_the_tape_raises(row: int) -> None:
    with pytest.raises(IndexError, match="outside this tape"):
        address_map(two_segments(), row)


def test_tape_of_a_cpu_gives_a_sentence() -> None:
    (note,) = blocks_figure(small_tape()).layout.annotations
    assert note.text.startswith("No segments")
    assert fragmentation_text(small_tape(), 0) == "No memory is reserved: the allocator holds no segment."


def test_empty_tape_gives_an_empty_figure() -> None:
    assert len(blocks_figure(Tape.from_columns({"action": np.array([], dtype=int)}, meta=GPU)).data) == 0
