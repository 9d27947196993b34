"""Growth from step to step: the table of what grows, and the leak among it."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from memexplore import simulate
from memexplore.analysis import growth
from memexplore.tape import Category, Meta, Phase, Source, Tape
from tests.sample_tapes import CPU, GIB, MIB, T4, Program, leaking_tape, training_tape


def test_growth_finds_the_line_of_a_leak() -> None:
    table = growth.growth(leaking_tape(4))
    assert table[["layer", "line", "category"]].to_numpy().tolist() == [["(no layer)", "train.py:9", "activation"]]
    # the first step is warm-up: 200 after the second, 400 after the fourth
    assert table[[2, 3, 4, "grew"]].to_numpy().tolist() == [[200, 300, 400, 200]]
    assert growth.growth_text(leaking_tape(4)).startswith(
        "200 B at the end of step 2 grew to 400 B at the end of step 4, +200 B (+100 %)"
    )


def test_growth_is_that_of_the_requests() -> None:
    kept: list[torch.Tensor] = []

    def run() -> None:
        layer = nn.Linear(4, 4).cuda()
        optimizer = torch.optim.SGD(layer.parameters())
        for _ in range(8):
            layer(torch.zeros(2, 4, device="cuda")).sum().backward()
            optimizer.step()
            kept.append(torch.zeros(39 * MIB // 2, dtype=torch.uint8, device="cuda"))

    found = growth.leak(simulate(run))
    # Each block is 20 MiB: half a MiB is too little to be split off.
    assert found is not None
    assert found.bytes_per_period == 39 * MIB // 2


def test_growth_ignores_an_unfinished_step() -> None:
    tape = leaking_tape(4)
    # the last three rows are the mark of backward and the free of the activation
    assert growth.growth(tape[:-3])[[2, 3, "grew"]].to_numpy().tolist() == [[200, 300, 100]]


def test_growth_of_training_without_a_leak_is_empty() -> None:
    assert len(growth.growth(training_tape(steps=5))) == 0
    assert growth.growth_text(training_tape(steps=5)) == ""


def test_memory_that_a_program_allocates_once_and_keeps_is_not_in_the_table() -> None:
    program = Program()
    for step in range(1, 6):
        program.mark(step, Phase.FORWARD)
        if step == 3:
            program.alloc(400, Category.OPTIMIZER_STATE, "zeros_like", "discriminator", 12)
    assert len(growth.growth(program.tape())) == 0


def test_gradients_of_the_last_step_are_not_in_the_table_where_each_step_begins_with_zero_grad() -> None:
    program = Program()
    gradient = None
    for step in range(1, 4):
        if gradient is not None:
            program.free(gradient)
        program.mark(step, Phase.FORWARD)
        program.mark(step, Phase.BACKWARD)
        gradient = program.alloc(400, Category.GRADIENT, "mm", "fc", 3)
    assert len(growth.growth(program.tape())) == 0


def test_a_step_whose_rows_lie_between_those_of_others_ends_once() -> None:
    # Each row allocates a block of 512 B; step 2 ends in row 3, step 3 in row 4 and step 4 in row 5.
    steps = [1, 2, 3, 2, 3, 4]
    columns = {"address": [512 * row for row in range(6)], "size": [512] * 6, "step": steps}
    table = growth.growth(Tape.from_columns(columns, meta=Meta(Source.MEASURED, "cpu")))
    assert table[[2, 3, 4, "grew"]].to_numpy().tolist() == [[2048, 2560, 3072, 1024]]


def test_growth_of_two_steps_is_empty() -> None:
    assert len(growth.growth(leaking_tape(2))) == 0


# -- leaks


def program_of(steps: int, work: Callable[[Program, int], object], *, capacity: int | None = None) -> Tape:
    """Return a tape of a model of 1 MiB whose steps each do some work in the forward pass."""
    program = Program()
    program.alloc(MIB, Category.PARAMETER, "empty", "fc", 3)
    for step in range(1, steps + 1):
        program.mark(step, Phase.FORWARD)
        work(program, step)
        program.mark(step, Phase.BACKWARD)
    return program.tape(CPU if capacity is None else T4._replace(capacity=capacity))


def leaked(program: Program, size: int, line: int = 9) -> None:
    program.alloc(size, Category.ACTIVATION, "sum", "", line)


def test_leak_has_its_bytes_a_step_its_line_and_the_step_in_which_the_device_is_full() -> None:
    tape = program_of(4, lambda program, _: leaked(program, 16 * MIB), capacity=14 * GIB + 65 * MIB)
    found = growth.leak(tape)
    assert found is not None
    # After four steps 1 + 4 * 16 = 65 MiB are used and 14 GiB are left: 14 * 1024 / 16 = 896 steps more, 900 in all
    assert (found.bytes_per_period, found.full_at) == (16 * MIB, 4 + 896)
    assert tape.stacks[tape.stack[found.row]][1].line == 9


def test_growth_of_a_tape_without_capacity_has_no_last_step() -> None:
    found = growth.leak(leaking_tape(4))
    assert found is not None
    assert (found.bytes_per_period, found.full_at) == (100, None)


def test_training_does_not_leak() -> None:
    # its first step allocates the state of AdamW
    assert growth.leak(training_tape(steps=8)) is None


@pytest.mark.parametrize(
    ("name", "work"),
    [
        ("optimizer state of the second step", lambda program, step: step == 2 and leaked(program, 64 * MIB)),
        ("second model in the middle", lambda program, step: step == 10 and leaked(program, 64 * MIB)),
        ("once in the last step", lambda program, step: step == 20 and leaked(program, 64 * MIB)),
        ("two buffers", lambda program, step: step in (5, 12) and leaked(program, 64 * MIB)),
        ("cache that fills in 12 steps", lambda program, step: step <= 12 and leaked(program, 64 * MIB)),
        ("slow warm-up", lambda program, step: step in (2, 3, 4) and leaked(program, 64 * MIB)),
    ],
)
def test_growth_that_ends_is_no_leak(name: str, work: Callable[[Program, int], object]) -> None:
    assert growth.leak(program_of(20, work)) is None, name


def test_queue_of_the_last_three_losses_is_no_leak() -> None:
    kept: list[int] = []

    def work(program: Program, _: int) -> None:
        kept.append(program.alloc(MIB, Category.ACTIVATION, "sum", "", 9))
        if len(kept) > 3:
            program.free(kept.pop(0))

    assert growth.leak(program_of(20, work)) is None


def test_one_off_growth_does_not_change_the_rate_of_a_leak_from_the_same_line() -> None:
    def work(program: Program, step: int) -> None:
        leaked(program, MIB)
        if step == 7:
            leaked(program, 512 * MIB)

    found = growth.leak(program_of(20, work))
    # Of the 19 * 18 / 2 = 171 pairs of steps from 2 to 20, 5 * 14 = 70 have step 7 between them: less than half.
    assert found is not None
    assert found.bytes_per_period == MIB


def test_leak_of_every_tenth_step_has_its_mean_rate() -> None:
    found = growth.leak(program_of(60, lambda program, step: step % 10 == 0 and leaked(program, 10 * MIB)))
    assert found is not None
    # 10 MiB in 10 steps; the median of a staircase is its mean up to the ends
    assert abs(found.bytes_per_period - MIB) < 0.1 * MIB


def test_leak_is_found_beside_batches_of_any_size() -> None:
    held: list[int] = []

    def work(program: Program, step: int) -> None:
        program.free(*held)
        # The batch of a step lives until the next: 1 to 7 MiB in no order.
        held[:] = [program.alloc((step * 5 % 7 + 1) * MIB, Category.INPUT, "randn", "", 5)]
        leaked(program, MIB)

    found = growth.leak(program_of(30, work))
    assert found is not None
    assert found.bytes_per_period == MIB


def test_tensor_that_grows_by_concatenation_leaks() -> None:
    held: list[int] = []

    def work(program: Program, step: int) -> None:
        longer = program.alloc(step * MIB, Category.ACTIVATION, "cat", "", 9)
        program.free(*held)
        held[:] = [longer]

    found = growth.leak(program_of(10, work))
    assert found is not None
    assert found.bytes_per_period == MIB


def test_leak_whose_tensors_change_their_category_is_found() -> None:
    # As with `kept = torch.cat([kept, output])`: all results but the last are inputs of a later op.
    held: list[int] = []

    def work(program: Program, step: int) -> None:
        kind = Category.TEMPORARY if step == 10 else Category.INPUT
        longer = program.alloc(step * MIB, kind, "cat", "", 9)
        program.free(*held)
        held[:] = [longer]

    found = growth.leak(program_of(10, work))
    assert found is not None
    assert found.bytes_per_period == MIB


def test_leak_is_found_although_the_end_of_the_program_frees_it() -> None:
    kept: list[int] = []

    def work(program: Program, step: int) -> None:
        kept.append(program.alloc(16 * MIB, Category.ACTIVATION, "sum", "", 9))
        if step == 6:
            program.free(*kept)

    found = growth.leak(program_of(6, work))
    assert found is not None
    assert found.bytes_per_period == 16 * MIB


def test_three_finished_steps_are_too_few() -> None:
    # The first is warm-up, and what grows from the second to the third may have grown once.
    assert growth.leak(leaking_tape(3)) is None


def test_a_number_kept_in_each_step_of_a_large_model_is_no_leak() -> None:
    # 512 bytes a step fill the 10 GiB that are left in 20 million steps
    tape = program_of(6, lambda program, _: leaked(program, 512), capacity=10 * GIB)
    assert growth.leak(tape) is None


def test_leak_of_a_run_out_of_memory_is_never_full_later() -> None:
    def work(program: Program, step: int) -> None:
        leaked(program, GIB)
        if step == 8:
            program.oom(GIB, "mm", "fc", 6)

    found = growth.leak(program_of(8, work, capacity=8 * GIB))
    assert found is not None
    assert (found.bytes_per_period, found.full_at) == (GIB, None)


def test_more_than_a_hundred_steps_are_compared_by_steps_not_by_samples() -> None:
    found = growth.leak(program_of(250, lambda program, _: leaked(program, 3 * MIB)))
    assert found is not None
    assert found.bytes_per_period == 3 * MIB


@given(st.lists(st.integers(0, 40), min_size=4, max_size=30), st.integers(1, 20))
def test_any_leak_of_equal_size_is_found_whatever_lives_in_one_step(sizes: list[int], leak: int) -> None:
    def work(program: Program, step: int) -> None:
        program.free(program.alloc(sizes[step - 1] * MIB, Category.ACTIVATION, "mm", "fc", 8))
        leaked(program, leak * MIB)

    found = growth.leak(program_of(len(sizes), work))
    assert found is not None
    assert found.bytes_per_period == leak * MIB


@given(st.lists(st.integers(0, 40), min_size=1, max_size=30))
def test_steps_that_free_all_never_leak(sizes: list[int]) -> None:
    def work(program: Program, step: int) -> None:
        program.free(program.alloc(sizes[step - 1] * MIB, Category.ACTIVATION, "mm", "fc", 8))

    assert growth.leak(program_of(len(sizes), work)) is None


def test_memory_that_varies_from_step_to_step_is_no_leak() -> None:
    # Sizes in MiB at the ends of steps, as of batches of varying length that a variable keeps until the next one. After
    # the first step the lowest of the later ones are 1 1 1 1 1 1 2 2 3 3 4: they rise to the end.
    lengths = [9, 5, 7, 1, 6, 8, 1, 9, 2, 7, 3, 4]
    kept: list[int] = []

    def work(program: Program, step: int) -> None:
        if kept:
            program.free(kept.pop())
        kept.append(program.alloc(lengths[step - 1] * MIB, Category.INPUT, "empty", "", 5))

    assert growth.leak(program_of(len(lengths), work, capacity=GIB)) is None


def test_what_is_kept_of_batches_of_varying_length_is_a_leak() -> None:
    lengths = [9, 5, 7, 1, 6, 8, 1, 9, 2, 7, 3, 4]

    def work(program: Program, step: int) -> None:
        program.alloc(lengths[step - 1] * MIB, Category.ACTIVATION, "empty", "", 5)

    assert growth.leak(program_of(len(lengths), work, capacity=GIB)) is not None
