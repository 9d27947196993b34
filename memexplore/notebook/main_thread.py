"""The kernel's main thread: what is to be run on it as soon as it has nothing else to do."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

from IPython.core.getipython import get_ipython

Action = Callable[[], Any]


class MainThread:
    """Runs things one after the other on the main thread of a kernel; where there is no kernel, at once."""

    def __init__(self) -> None:
        self._loop = getattr(getattr(get_ipython(), "kernel", None), "io_loop", None)

    @property
    def is_kernel(self) -> bool:
        """Whether there is a kernel, so that things wait for the cell that runs."""
        return self._loop is not None

    def run(self, action: Action) -> None:
        """Run something when the main thread is idle; may be called from any thread."""
        if self._loop is None:
            action()
        else:
            self._loop.add_callback(action)

    def run_after(self, seconds: float, action: Action) -> None:
        """Run something when some time has gone; never where there is no kernel."""
        if self._loop is not None:
            loop = self._loop
            loop.add_callback(lambda: loop.call_later(seconds, action))

    def is_wanted(self) -> bool:
        """Whether something waits for the main thread, such as a message of the browser.

        Asks the selector of the event loop, which takes nothing away from whoever is waiting; where the loop has none
        the answer is always yes.
        """
        selector = getattr(getattr(self._loop, "asyncio_loop", None), "_selector", None)
        return selector is None or threading.current_thread() is not threading.main_thread() or bool(selector.select(0))
