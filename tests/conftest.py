"""What every test leaves as it was."""

from __future__ import annotations

import sys
from collections.abc import Iterator

import pytest


@pytest.fixture(autouse=True)
def main_module() -> Iterator[None]:
    """An IPython shell puts a module of its own in the place of `__main__`, which spawned processes look at."""
    before = sys.modules["__main__"]
    yield
    sys.modules["__main__"] = before
