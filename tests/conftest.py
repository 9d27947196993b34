"""State that every test restores, and how pytest-xdist distributes tests over its processes."""

from __future__ import annotations

import contextlib
import gc
import os
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import hypothesis
import pytest
from xdist.scheduler import LoadFileScheduling

from tests.layout import depends_on_torch

# How long an example takes depends on the machine. The rest is as Hypothesis has it, here and in CI.
hypothesis.settings.register_profile("memexplore", parent=hypothesis.settings(), deadline=None)
hypothesis.settings.load_profile("memexplore")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Give the marker `torch` to tests whose result depends on the release of torch."""
    for item in items:
        if depends_on_torch(item.path.relative_to(config.rootpath)):
            item.add_marker(pytest.mark.torch)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> LoadFileScheduling:
    """Run the tests of one file in one process, which caches shared values, and all browser tests in one process."""
    return _ByFile(config, log)


class _ByFile(LoadFileScheduling):
    def _split_scope(self, nodeid: str) -> str:
        return "tests/browser" if nodeid.startswith("tests/browser/") else super()._split_scope(nodeid)


# --- browser tests run while no other test does ---------------------------------------------------------------------

_LOCKS = "MEMEXPLORE_TEST_LOCKS"


def pytest_configure(config: pytest.Config) -> None:
    """Make the folder of the locks, which the processes of pytest-xdist inherit in their environment."""
    if not hasattr(config, "workerinput"):
        folder = tempfile.TemporaryDirectory(prefix="memexplore-tests-")
        config.add_cleanup(folder.cleanup)
        os.environ[_LOCKS] = folder.name


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    """Run a browser test while no other test runs: its server, kernel and browser need all processors."""
    if not hasattr(item.config, "workerinput") or sys.platform == "win32":
        return (yield)
    with _lock(alone=item.get_closest_marker("browser") is not None):
        return (yield)


@contextlib.contextmanager
def _lock(alone: bool) -> Iterator[None]:
    """Hold the lock of this run of pytest, alone or with other processes.

    A process that waits to be alone holds the gate, so that the others begin no further test.
    """
    import fcntl

    folder = Path(os.environ[_LOCKS])
    with open(folder / "gate", "w") as gate, open(folder / "lock", "w") as lock:
        fcntl.flock(gate, fcntl.LOCK_EX)
        fcntl.flock(lock, fcntl.LOCK_EX if alone else fcntl.LOCK_SH)
        if not alone:
            fcntl.flock(gate, fcntl.LOCK_UN)
        yield


@pytest.fixture(autouse=True)
def main_module() -> Iterator[None]:
    """Restore `__main__`: an IPython shell replaces it, and spawned processes import it."""
    before = sys.modules["__main__"]
    yield
    sys.modules["__main__"] = before


@pytest.fixture(autouse=True)
def modes_of_the_process() -> Iterator[None]:
    """Fail the test that leaves a mode of torch or frozen objects, rather than a later test of the same process."""
    before = _modes()
    yield
    after = _modes()
    assert after == (before or after)
    # Python 3.12 begins with some 400.
    assert gc.get_freeze_count() < 1000


def _modes() -> tuple[object, ...] | None:
    torch = sys.modules.get("torch")
    if torch is None or not hasattr(torch, "is_autocast_enabled"):
        return None
    autocast = [(torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)) for kind in ("cpu", "cuda")]
    return autocast, torch.get_default_dtype(), torch.is_grad_enabled(), torch.get_float32_matmul_precision()
