"""A short run of the fuzzer of programs; `python -m tests.fuzz --kind programs` runs it for long."""

from __future__ import annotations

import pytest
import torch

from tests.fuzz import programs


@pytest.mark.parametrize("number", range(30))
def test_the_virtual_gpu_holds_the_storages_that_the_program_holds(number: int) -> None:
    assert programs.check(number) == "equal"


def test_storages_that_are_not_counted_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    statistics = torch.cuda.memory_stats
    monkeypatch.setattr(programs, "_held", lambda: (statistics()["requested_bytes.all.current"] + 1, 0))
    with pytest.raises(AssertionError, match="97 bytes are requested, not 96"):
        programs.check(0, lines=1)
