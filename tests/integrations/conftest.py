"""A test begins without what accelerate keeps for the life of a process: precision, device, rank."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from accelerate.state import AcceleratorState, GradientState


@pytest.fixture(autouse=True)
def accelerate_without_a_record() -> Iterator[None]:
    yield
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()
