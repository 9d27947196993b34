"""The state that tests compare: threads of earlier tests are no part of it."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest

from tests.virtual_gpu.torch_state import global_state


class _Thread(threading.Thread):
    """A thread that runs until `end` is called."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self._ends = threading.Event()
        self.start()

    def run(self) -> None:
        self._ends.wait()

    def end(self) -> None:
        self._ends.set()
        self.join()


@pytest.fixture(scope="module")
def earlier_thread() -> Iterator[_Thread]:
    """A thread that was begun before the test."""
    thread = _Thread()
    yield thread
    thread.end()


def test_the_end_of_an_earlier_thread_changes_nothing(earlier_thread):
    before = global_state()
    earlier_thread.end()
    assert global_state() == before


def test_a_thread_that_the_test_leaves_is_a_change():
    before = global_state()
    thread = _Thread()
    assert global_state() != before
    thread.end()
    assert global_state() == before
