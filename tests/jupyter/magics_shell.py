"""An IPython shell with the extension loaded."""

from __future__ import annotations

from typing import Any

from IPython.core.interactiveshell import InteractiveShell
from IPython.utils.capture import capture_output

from memexplore.tape import Tape

# 1000 x 1000 numbers of 4 bytes, in blocks of 512 bytes: 7813 x 512
BLOCK = 4_000_256
ONES = 'torch.ones(1000, 1000, device="cuda")'


class Shell:
    """A shell with the extension loaded; `shown` lists the tapes of the views displayed."""

    def __init__(self, shell: InteractiveShell) -> None:
        self.shell = shell
        self.shown: list[Tape] = []
        self.text = ""

    def run(self, cell: str) -> Any:
        """Run a cell as a front end does, and return its result."""
        with capture_output() as captured:
            result = self.shell.run_cell(cell, store_history=True)
        self.text = captured.stdout + captured.stderr
        return result

    def __getitem__(self, name: str) -> Any:
        return self.shell.user_ns[name]


def cell_lines(error: BaseException) -> list[int]:
    """Return the line numbers of a traceback that lie in a cell, outermost first."""
    lines, trace = [], error.__traceback__
    while trace is not None:
        if "ipython-input" in trace.tb_frame.f_code.co_filename:
            lines.append(trace.tb_lineno)
        trace = trace.tb_next
    return lines
