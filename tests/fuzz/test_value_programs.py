"""A short run of the fuzzer of values; `python -m tests.fuzz --kind values` runs it for long."""

from __future__ import annotations

import logging
from collections.abc import Iterator

import pytest
import torch

from memexplore.virtual_gpu.values import known_values
from tests.fuzz import value_programs


@pytest.fixture(autouse=True)
def _quiet() -> Iterator[None]:
    """Keep torch from logging the errors that the programs expect."""
    logger = logging.getLogger("torch._subclasses.fake_tensor")
    level = logger.level
    logger.setLevel(logging.CRITICAL)
    yield
    logger.setLevel(level)


@pytest.mark.parametrize("first", range(0, 200, 10))
def test_a_value_is_that_of_the_cpu_or_unknown(first: int) -> None:
    for number in range(first, first + 10):
        assert value_programs.check(number) in {"equal", "refused"}


def test_a_wrong_value_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    put = known_values.put
    monkeypatch.setattr(known_values, "put", lambda tensor, values: put(tensor, torch.zeros_like(values)))
    with pytest.raises(AssertionError, match="instead of"):
        any(value_programs.check(number) == "wrong" for number in range(20))
