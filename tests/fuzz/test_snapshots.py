"""Short runs of the fuzzers of snapshot files; `python -m tests.fuzz` runs them for long."""

from __future__ import annotations

import pytest

from tests.fuzz import growing
from tests.fuzz.kinds import KINDS, check_growth
from tests.fuzz.runner import run_inputs


def findings(kind: str, numbers: range) -> list[str]:
    make = KINDS[kind]()
    return [
        f"{each.kind} {each.number}: {each.text}" for result in run_inputs(make, numbers) for each in result.findings
    ]


def test_damaged_changed_and_hostile_snapshots_are_read_or_refused() -> None:
    assert findings("snapshots", range(2000)) == []


def test_time_and_memory_are_linear_in_the_file() -> None:
    assert findings("growing", range(len(growing.STRUCTURES))) == []


def test_a_cost_that_grows_as_the_square_of_the_file_is_found() -> None:
    check_growth(0.1, 0.4)  # 4 times the file, 4 times the time
    with pytest.raises(AssertionError, match="4 times larger"):
        check_growth(0.1, 1.6)  # 4 * 4 times the time
