"""Work of the kernel's main thread in parts, with messages let through between them, cancelled by the next work."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from memexplore.jupyter.main_thread import MainThread

_SECONDS_AFTER_DRAWN = 0.1
"""Idle time of the kernel after a drawing, in which the next change of a control is answered without delay."""
_SECONDS_WITHOUT_BROWSER = 1.0
"""Time after which the work stops waiting for a browser to report that it has drawn."""


class IdleWork:
    """Does the latest work that it was given, one part at a time; without a kernel at once.

    `may_continue` says, before each part, whether nothing more urgent waits.
    """

    def __init__(self, thread: MainThread, may_continue: Callable[[], bool]) -> None:
        self._thread, self._may_continue = thread, may_continue
        self._parts: Iterator[None] = iter(())

    def cancel(self) -> Callable[[Callable[[], Iterator[None]]], None]:
        """Cancel the work in progress. Return a function that starts other work, unless that was cancelled too."""
        self._parts = pending = iter(())

        def start(work: Callable[[], Iterator[None]]) -> None:
            if self._parts is pending:
                self.start(work())

        return start

    def start(self, parts: Iterator[None]) -> None:
        """Start work, instead of any other."""
        self._parts = parts
        if self._thread.is_kernel:
            self._thread.run(lambda: self._continue(parts))
        else:
            for _ in parts:
                pass

    def start_after_drawing(
        self, draw: Callable[[Callable[[], None]], None], work: Callable[[], Iterator[None]]
    ) -> None:
        """Cancel the work in progress, draw, and start other work when a browser has called the function it gets.

        While the browser draws, it has the processor to itself; without a browser the work starts anyway.
        """
        start_work = self.cancel()

        def start() -> None:
            start_work(work)

        draw(lambda: self._thread.run_after(_SECONDS_AFTER_DRAWN, start))
        if self._thread.is_kernel:
            self._thread.run_after(_SECONDS_WITHOUT_BROWSER, start)
        else:
            start()

    def resume(self) -> None:
        """Do the rest of the work that something more urgent has interrupted, if that did not bring other work."""
        self.start(self._parts)

    def _continue(self, parts: Iterator[None]) -> None:
        if parts is self._parts and self._may_continue() and next(parts, self) is None:
            self._thread.run(lambda: self._continue(parts))
