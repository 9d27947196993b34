"""Show the traceback of a cell that ran out of memory below its post-mortem: it has 85 lines, and the answer a few."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import Any

from IPython.core.interactiveshell import InteractiveShell

from memexplore.text import ipython_shell


class TracebackBelow:
    """Sends such tracebacks of a notebook's shell when everything else has been shown for the cell.

    `is_in_cell` says whether the end of a cell will be announced: silent ones are not.
    """

    def __init__(self, shell: InteractiveShell, is_in_cell: Callable[[], bool]) -> None:
        self._shell, self._is_in_cell = shell, is_in_cell
        self._send = shell._showtraceback
        # IPython's way for subclasses to show a traceback elsewhere; its state of the error is set before.
        shell._showtraceback = self._show

    def _show(self, kind: type[BaseException], error: BaseException, traceback: list[str]) -> None:
        send = functools.partial(self._send, kind, error, traceback)
        # A debugger that starts now shows the traceback first.
        can_wait = ipython_shell.is_notebook() and self._is_in_cell() and not self._shell.call_pdb
        if can_wait and _is_out_of_memory(error):
            self._send_after_cell(send)
        else:
            send()

    def _send_after_cell(self, send: functools.partial[None]) -> None:
        events = self._shell.events

        def ended(result: Any) -> None:
            events.unregister("post_run_cell", ended)
            send()

        # Behind all that are registered: also what a block of `mx.watch` shows comes first.
        events.register("post_run_cell", ended)

    def close(self) -> None:
        """Show tracebacks where IPython shows them."""
        del self._shell._showtraceback


def _is_out_of_memory(error: BaseException) -> bool:
    # Without torch there is no such error, and importing it takes a second.
    if "torch" not in sys.modules:
        return False
    from memexplore.recorder.endings import out_of_memory_error

    return out_of_memory_error(error) is not None
