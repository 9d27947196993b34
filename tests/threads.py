"""Functions run in other threads, for tests."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any


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
