"""A short run of the fuzzer of interrupts; `python -m tests.fuzz --kind interruptions` runs it for long."""

from __future__ import annotations

import pytest

from tests.fuzz import interruptions


@pytest.mark.parametrize("number", range(40))
def test_an_interrupt_leaves_nothing_behind(number: int) -> None:
    interruptions.check(number)
