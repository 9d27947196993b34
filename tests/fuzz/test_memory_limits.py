"""A short run of the fuzzer of memory limits; `python -m tests.fuzz --kind memory` runs it for long."""

from __future__ import annotations

import pytest

from memexplore.virtual_gpu.patches import failed_backward
from tests.fuzz import memory_limits
from tests.fuzz.memory_limits import FAILURES


@pytest.mark.parametrize("setting", range(20))
def test_a_step_that_runs_out_of_memory_leaves_nothing(setting: int) -> None:
    numbers = range(setting * FAILURES, (setting + 1) * FAILURES)
    assert [memory_limits.check(number) for number in numbers].count("out of memory") >= 2


def test_a_graph_that_stays_alive_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(failed_backward, "_empty_queue", lambda: None)
    with pytest.raises(AssertionError, match="bytes are left"):
        for number in range(16, 40):
            memory_limits.check(number)
