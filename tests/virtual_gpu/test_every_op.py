"""A part of torch's op database, evenly spread, gives the metadata of the CPU on the virtual GPU; see every_op.py."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.virtual_gpu import every_op

pytestmark = pytest.mark.filterwarnings("ignore")
_DATABASE = every_op.database()
EVERY = 12
"""One in so many ops runs here; `python -m tests.virtual_gpu.every_op` runs all."""


@pytest.mark.parametrize("op", _DATABASE[::EVERY], ids=lambda op: f"{op.name}-{op.variant_test_name}")
def test_results_and_gradients_have_the_metadata_of_the_cpu(op: Any) -> None:
    found = list(every_op.failures(op, samples=2))
    if op.name in every_op.EXPECTED:
        pytest.skip(every_op.EXPECTED[op.name])
    assert found == []


def test_every_expected_difference_names_an_op() -> None:
    assert every_op.EXPECTED.keys() <= {op.name for op in _DATABASE}


def test_the_database_leaves_assignments_to_flags_of_torch_allowed() -> None:
    assert not torch.backends.flags_frozen()
