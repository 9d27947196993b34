"""Failed requests replayed without blocks that were alive."""

from __future__ import annotations

from memexplore.out_of_memory.counterfactual import fits_without
from memexplore.tape import Action, Meta, Source, Tape

MIB = 1 << 20


def test_a_block_that_the_rest_of_the_run_frees_is_freed_once() -> None:
    # 20 MiB, then 20 MiB that a GPU of 30 MiB does not have, and behind them the free of the first.
    actions = [Action.ALLOC, Action.ALLOC, Action.FREE_REQUESTED, Action.FREE_COMPLETED]
    columns = {"action": actions, "address": [0, 1 << 30, 0, 0], "size": [20 * MIB] * 4}
    tape = Tape.from_columns(columns, meta=Meta(Source.PREDICTED, "Tesla T4", capacity=30 * MIB))
    assert not fits_without(tape, [], failing=1)
    assert fits_without(tape, [0], failing=1)
