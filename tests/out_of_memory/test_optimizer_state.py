"""Updates that fail before the optimizer has all of its state: the cause is what would happen next."""

from __future__ import annotations

import functools
from collections.abc import Callable

import pytest
import torch

from memexplore.out_of_memory.cause import Cause
from memexplore.out_of_memory.optimizer_state import state_to_come
from tests.out_of_memory.cells import post_mortem

MIB = 1 << 20
IN_PIECES = """
large = [torch.empty(30 << 18, device="cuda") for _ in range(4)]
del large
weights = [nn.Parameter(torch.zeros(22 << 18, device="cuda")) for _ in range(4)]  # leave 8 MiB in each segment
optimizer = torch.optim.Adam(weights, fused=True)
for weight in weights:
    weight.grad = torch.zeros_like(weight)
optimizer.step()
"""


def test_fragmentation_is_no_cause_where_the_rest_of_the_state_would_not_fit() -> None:
    found = post_mortem(IN_PIECES, "230MiB")
    # 4 weights and 4 gradients of 22 MiB are allocated: 230 - 176 = 54 are free, 8 averages of 22 are to come.
    free = found.memory.gaps + (found.memory.free or 0)
    assert (found.cause, found.state_to_come, found.missing) == (Cause.TOO_MUCH, 8 * 22 * MIB, 8 * 22 * MIB - free)
    assert "at least 176 MiB of its state still to allocate" in found.sentences[-1]


def test_fragmentation_is_the_cause_where_the_rest_of_the_state_fits() -> None:
    # The last of 8 averages, 22 of 370 - 330 = 40 MiB.
    assert post_mortem(IN_PIECES, "370MiB").cause is Cause.FRAGMENTATION


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        (torch.optim.Adam, 2 * 32 * 4),  # two averages of 32 numbers
        (functools.partial(torch.optim.AdamW, amsgrad=True), 3 * 32 * 4),  # and the largest second average
        (torch.optim.Adagrad, 0),  # allocated when the optimizer was made
        (torch.optim.Adafactor, 0),  # a matrix has none of its own shape
    ],
)
def test_state_to_come_of_a_first_update(kind: Callable[..., torch.optim.Optimizer], expected: int) -> None:
    weight = torch.nn.Parameter(torch.zeros(4, 8))
    weight.grad = torch.zeros(4, 8)
    assert state_to_come(kind([weight], lr=0.1)) == expected


def test_weights_without_gradients_get_no_state() -> None:
    assert state_to_come(torch.optim.Adam([torch.nn.Parameter(torch.zeros(8))])) == 0
