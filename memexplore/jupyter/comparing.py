"""`%memcompare`: a step or a cell on the GPU of this machine and on the virtual one."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from IPython.core.error import UsageError
from IPython.core.interactiveshell import InteractiveShell

from memexplore.jupyter.dropped_displays import without_displays
from memexplore.jupyter.dry_run import cell_of

if TYPE_CHECKING:
    from memexplore.analysis.comparison import Comparison


def compared(shell: InteractiveShell, line: str, cell: str | None, raw: str, names: dict[str, Any]) -> Comparison:
    """Return the comparison of a cell, whose text is `raw`, or of the step that a line names.

    Raises what the program raises, except running out of memory; UsageError for what is no program, and on a machine
    without a usable GPU.
    """
    __tracebackhide__ = True
    from memexplore.run.comparing import NoGpuError, compare
    from memexplore.run.programs.step import Step

    if cell is None and not line.strip():
        raise UsageError("%memcompare needs a step: %memcompare mx.Step(model, batch), or %%memcompare above a cell")
    program = eval(line, names) if cell is None else cell_of(shell, cell, raw, names)
    if cell is None and not isinstance(program, Step):
        raise UsageError(f"%memcompare runs an mx.Step, and this is a {type(program).__name__}")
    try:
        with without_displays():
            return compare(program)
    except NoGpuError as error:
        raise UsageError(str(error)) from None
