"""Runs of a cell whose displays do not reach a notebook, while the displays of other threads do."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from IPython.core.getipython import get_ipython


@contextlib.contextmanager
def without_displays() -> Iterator[None]:
    """Drop what this thread displays in the block: Jupyter would append it to the cell that ran last.

    `IPython.utils.capture.capture_output` exchanges the display publisher of the whole process, and a message of the
    browser that arrives in another thread meanwhile fails. The hooks of ipykernel's publisher are those of a thread.
    """
    publisher: Any = getattr(get_ipython(), "display_pub", None)
    if not hasattr(publisher, "register_hook"):  # outside of a kernel it prints
        yield
        return

    def drop(message: Any) -> None:
        return None

    publisher.register_hook(drop)
    try:
        yield
    finally:
        publisher.unregister_hook(drop)
