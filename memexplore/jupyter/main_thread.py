"""The kernel's main thread: callbacks that run on it when it is idle."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

from IPython.core.getipython import get_ipython

Action = Callable[[], Any]


class MainThread:
    """Runs callbacks one after the other on the main thread of a kernel; without a kernel, immediately."""

    def __init__(self) -> None:
        self._loop = getattr(getattr(get_ipython(), "kernel", None), "io_loop", None)

    @property
    def is_kernel(self) -> bool:
        """Whether a kernel is running, so that callbacks wait for the end of the running cell."""
        return self._loop is not None

    def run(self, action: Action) -> None:
        """Run a callback when the main thread is idle. May be called from any thread."""
        if self._loop is None:
            action()
        else:
            self._loop.add_callback(action)

    def run_after(self, seconds: float, action: Action) -> None:
        """Run a callback after some seconds; never without a kernel."""
        if self._loop is not None:
            loop = self._loop
            loop.add_callback(lambda: loop.call_later(seconds, action))

    @property
    def sees_events(self) -> bool:
        """Whether `has_pending_events` can see events: with an event loop that has a selector, on the main thread."""
        return self._selector is not None and threading.current_thread() is threading.main_thread()

    @property
    def _selector(self) -> Any:
        return getattr(getattr(self._loop, "asyncio_loop", None), "_selector", None)

    def has_pending_events(self) -> bool:
        """Return whether an event, such as a message from the browser, waits for the main thread.

        Polls the selector of the event loop, which removes no event from its queue. True in another thread, and with an
        event loop without a selector.
        """
        selector = self._selector
        return selector is None or threading.current_thread() is not threading.main_thread() or bool(selector.select(0))
