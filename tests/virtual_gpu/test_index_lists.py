"""Indexing of virtual tensors with lists, ranges and numpy arrays: the values of the index stay known."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from memexplore import simulate, virtual
from memexplore.tape import Action


@pytest.mark.parametrize(
    "index",
    [
        [2, 0],
        range(1, 3),
        np.array([2, 0]),
        np.array([True, False, True, False]),
        [True, False, True, False],
        (slice(None), [1, 0]),
        ([0, 3], [1, 1]),
        [np.int64(3)],
    ],
    ids=str,
)
def test_values_at_the_index_are_known(index: object) -> None:
    expected = torch.arange(12).view(4, 3)[index]  # type: ignore[index]
    with virtual("T4"):
        table = torch.arange(12).view(4, 3).cuda()
        assert table[index].tolist() == expected.tolist()  # type: ignore[index]


def test_values_written_at_a_list_are_known() -> None:
    with virtual("T4"):
        counts = torch.zeros(4, device="cuda")
        counts[[0, 2]] = 5
        counts[[2, 3]] += 1
        assert counts.tolist() == [5, 0, 6, 1]


def test_list_requests_what_an_index_on_the_cpu_requests() -> None:
    def gather(index: object) -> list[int]:
        def run() -> None:
            torch.arange(12.0).cuda()[index]  # type: ignore[index]

        tape = simulate(run, gpu="T4")
        return tape.size[tape.action == Action.ALLOC].tolist()

    # 12 floats, two 64-bit indices, two floats.
    assert gather([2, 0]) == gather(torch.tensor([2, 0])) == [48, 16, 8]
