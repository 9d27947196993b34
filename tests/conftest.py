"""State that every test restores, and how tests are distributed over the processes of pytest-xdist."""

from __future__ import annotations

import sys
from collections.abc import Iterator

import pytest


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Run the tests of one file in one process, which caches what they share, and all browser tests in one process."""
    for item in items:
        folder = item.path.parent.name
        item.add_marker(pytest.mark.xdist_group(folder if folder == "browser" else str(item.path)))


@pytest.fixture(autouse=True)
def main_module() -> Iterator[None]:
    """An IPython shell puts a module of its own in the place of `__main__`, which spawned processes look at."""
    before = sys.modules["__main__"]
    yield
    sys.modules["__main__"] = before
