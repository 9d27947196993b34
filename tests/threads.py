"""Other threads and processes, for tests."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

EARLIER: set[threading.Thread] = set()
"""Threads that ran when the test began, such as one that waits for a process to end. They end at any time."""


def begun() -> list[str]:
    """Return the names of the threads that run and that this test has begun."""
    return sorted(thread.name for thread in threading.enumerate() if thread not in EARLIER)


def in_thread(function: Callable[[], Any]) -> Any:
    """Run a function in a new thread and return its result."""
    results: list[Any] = []
    thread = threading.Thread(target=lambda: results.append(function()))
    thread.start()
    thread.join()
    return results[0]


def at_once(count: int, function: Callable[[], object]) -> None:
    """Run a function in several threads, none of which ends before all have run it."""
    barrier = threading.Barrier(count)

    def run() -> None:
        function()
        barrier.wait()

    threads = [threading.Thread(target=run) for _ in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def has_ended(process: Any) -> None:
    """Wait for the end of a process for which a thread waits too.

    Where the thread is first, `join` returns before the status is set, and `is_alive` is still true.
    """
    end = time.monotonic() + 200
    while process.exitcode is None and time.monotonic() < end:
        time.sleep(0.01)
    assert process.exitcode is not None
