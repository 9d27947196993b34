"""Storages that code resizes in a recorded step, as FSDP does with gathered parameters: no dispatch mode sees it."""

from __future__ import annotations

import numpy as np
import torch

import memexplore as mx
from memexplore.tape import Action, Category
from tests.live.training import Loop


def test_a_storage_that_code_empties_and_fills_is_freed_and_allocated_in_the_recorded_step():
    # 1000 float32.
    loop, gathered = Loop(), torch.zeros(1000)
    with mx.watch(loop.model, loop.optimizer, first=1) as live:
        gathered.untyped_storage().resize_(0)
        gathered.untyped_storage().resize_(4000)
        gathered.fill_(1.0)
        loop.step()
    tape = live.tape(1)
    rows = [row for row in range(len(tape)) if tape.size[row] == 4000]
    actions = [Action(int(tape.action[row])) for row in rows]
    assert actions == [Action.PREEXISTING, Action.FREE_REQUESTED, Action.FREE_COMPLETED, Action.ALLOC]
    assert tape.ops[tape.op[rows[-1]]] == "UntypedStorage.resize_"


def test_a_parameter_whose_storage_is_emptied_for_a_while_stays_a_parameter():
    loop = Loop()
    weight = loop.model[0].weight
    with mx.watch(loop.model, loop.optimizer, first=1) as live:
        loop.model(torch.zeros(8, 64))
        weight.data.untyped_storage().resize_(0)
        weight.data.untyped_storage().resize_(128 * 64 * 4)
        loop.step()
    tape = live.tape(1)
    # 128 × 64 float32.
    blocks = (tape.size == 128 * 64 * 4) & np.isin(tape.action, (Action.PREEXISTING, Action.ALLOC))
    filled = [row for row in np.flatnonzero(blocks) if tape.op[row] >= 0 and "resize_" in tape.ops[tape.op[row]]]
    assert [Category(int(tape.category[row])) for row in filled] == [Category.PARAMETER]
    assert tape.modules[tape.module[filled[0]]] == "0"


def test_resizing_is_as_before_after_the_run():
    before = vars(torch.UntypedStorage).get("resize_")
    loop = Loop()
    with mx.watch(loop.model, loop.optimizer, first=1):
        assert vars(torch.UntypedStorage).get("resize_") is not before
        loop.step()
    assert vars(torch.UntypedStorage).get("resize_") is before
