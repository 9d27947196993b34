"""Memory by line, layer and category: live blocks, growth from step to step, difference of two tapes."""

from __future__ import annotations

import memexplore as mx
from memexplore.analysis import curves, groups
from memexplore.tape import Category, Frame, Meta, Phase, Source, Tape
from tests.sample_tapes import GIB, Program, oom_tape, small_tape, training_tape


def test_by_line_sums_to_the_peak() -> None:
    table = groups.by_line(training_tape())
    assert table["size"].sum() == curves.peak(training_tape())[0]
    assert table["size"].is_monotonic_decreasing
    assert table["line"].is_unique


def test_by_line_after_a_row() -> None:
    # after row 4 of small_tape: 400 of line 3, 100 of line 5, 200 of line 6, 50 of line 7
    table = groups.by_line(small_tape(), 4)
    assert table["line"].tolist() == ["train.py:3", "train.py:6", "train.py:5", "train.py:7"]
    assert table["size"].tolist() == [400, 200, 100, 50]
    assert table["category"].tolist() == ["parameter", "activation", "input", "temporary"]


def leaking_tape(steps: int) -> Tape:
    """Return a tape whose steps never free the 100 bytes of their loss, from line 9; a step frees its other blocks."""
    program = Program()
    program.alloc(1000, Category.PARAMETER, "empty", "fc", 3)
    for step in range(1, steps + 1):
        program.mark(step, Phase.FORWARD)
        held = program.alloc(500, Category.ACTIVATION, "mm", "fc", 8)
        program.alloc(100, Category.ACTIVATION, "sum", "", 9)
        program.mark(step, Phase.BACKWARD)
        program.free(held)
    return program.tape()


def test_growth_finds_the_line_of_a_leak() -> None:
    table = groups.growth(leaking_tape(4))
    assert table[["layer", "line", "category"]].to_numpy().tolist() == [["(no layer)", "train.py:9", "activation"]]
    # the first step is warm-up: 200 after the second, 400 after the fourth
    assert table[[2, 3, 4, "grew"]].to_numpy().tolist() == [[200, 300, 400, 200]]
    assert groups.growth_text(leaking_tape(4)).startswith(
        "200 B at the end of step 2 grew to 400 B at the end of step 4, +200 B (+100 %)"
    )


def test_growth_ignores_an_unfinished_step() -> None:
    tape = leaking_tape(4)
    # the last three rows are the mark of backward and the free of the activation
    assert groups.growth(tape[:-3])[[2, 3, "grew"]].to_numpy().tolist() == [[200, 300, 100]]


def test_growth_of_training_without_a_leak_is_empty() -> None:
    assert len(groups.growth(training_tape(steps=5))) == 0
    assert groups.growth_text(training_tape(steps=5)) == ""


def test_memory_that_a_program_allocates_once_and_keeps_is_no_leak() -> None:
    program = Program()
    for step in range(1, 6):
        program.mark(step, Phase.FORWARD)
        if step == 3:
            program.alloc(400, Category.OPTIMIZER_STATE, "zeros_like", "discriminator", 12)
    assert len(groups.growth(program.tape())) == 0


def test_a_step_whose_rows_lie_between_those_of_others_ends_once() -> None:
    # Each row allocates a block of 512 B; step 2 ends in row 3, step 3 in row 4 and step 4 in row 5.
    steps = [1, 2, 3, 2, 3, 4]
    columns = {"address": [512 * row for row in range(6)], "size": [512] * 6, "step": steps}
    table = groups.growth(Tape.from_columns(columns, meta=Meta(Source.MEASURED, "cpu")))
    assert table[[2, 3, 4, "grew"]].to_numpy().tolist() == [[2048, 2560, 3072, 1024]]


def test_growth_of_two_steps_is_empty() -> None:
    assert len(groups.growth(leaking_tape(2))) == 0


def test_oom_text_has_request_free_memory_and_holders() -> None:
    # 1 GiB of parameters from line 3 and 2 GiB of activations from line 6 fill 3 GiB of segments; 4 GiB is the capacity
    assert groups.oom_text(oom_tape()) == (
        "A request for 2.00 GiB failed at train.py:7: 3.00 GiB reserved, 1.00 GiB of the device left and nothing "
        "free in them. The largest holders of the 3.00 GiB allocated: train.py:6 (2.00 GiB, activation), "
        "train.py:3 (1.00 GiB, parameter)."
    )
    assert curves.curve(oom_tape(), "reserved")[-1] == 3 * GIB


def test_oom_text_of_a_run_that_fits_is_empty() -> None:
    assert groups.oom_text(small_tape()) == ""


def one_layer(size: int, address: int, line: int = 3) -> Tape:
    return Tape.from_columns(
        {"address": [address], "size": [size], "module": [0], "stack": [0], "category": [Category.ACTIVATION]},
        modules=["fc"],
        stacks=[(Frame("train.py", line, "step"),)],
        meta=Meta(Source.MEASURED, "cpu"),
    )


def test_diff_ignores_addresses() -> None:
    table = mx.diff(one_layer(100, address=0), one_layer(250, address=4096))
    assert table.to_numpy().tolist() == [["fc", "train.py:3", "activation", 100, 250, 150]]


def test_diff_of_a_tape_with_itself_is_zero() -> None:
    table = mx.diff(training_tape(), training_tape())
    assert (table["difference"] == 0).all()
    assert table["before"].sum() == curves.peak(training_tape())[0]


def test_diff_has_rows_of_only_one_tape() -> None:
    table = mx.diff(one_layer(100, 0, line=3), one_layer(250, 0, line=4))
    assert table[["line", "before", "after", "difference"]].to_numpy().tolist() == [
        ["train.py:4", 0, 250, 250],
        ["train.py:3", 100, 0, -100],
    ]


def test_diff_sums_to_both_peaks() -> None:
    small, large = training_tape(batch=4), training_tape(batch=8)
    table = mx.diff(small, large)
    assert table["before"].sum() == curves.peak(small)[0]
    assert table["after"].sum() == curves.peak(large)[0]
    assert table["difference"].abs().is_monotonic_decreasing


def test_diff_text_has_sign_and_per_cent() -> None:
    assert groups.diff_text(one_layer(2048, 0), one_layer(1024, 0)) == (
        "Peak 2.00 KiB -> 1.00 KiB allocated (-1.00 KiB, -50 %)"
    )


def test_diff_of_empty_tapes_is_empty() -> None:
    assert len(mx.diff(small_tape()[:0], small_tape()[:0])) == 0
