"""Say whether a cell will fit: run it on a virtual GPU only and in a copy of the notebook's names."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from IPython.core.error import UsageError
from IPython.core.interactiveshell import InteractiveShell

from memexplore.jupyter import cpu_names, profile
from memexplore.jupyter.options import Options

if TYPE_CHECKING:
    from memexplore.run.machine import Machine
    from memexplore.run.programs.cell import Cell
    from memexplore.tape import Tape

_SECONDS, _STEPS = 20.0, 3
"""The run ends after these seconds, if so many optimizer steps have ended: later ones are like them."""


def dry_run(shell: InteractiveShell, options: Options, code: str, raw: str, names: dict[str, Any]) -> None:
    """Run a cell in a copy of `names` and on a virtual GPU, and show whether it fits; `raw` is the text of the cell.

    Without a GPU in the options, the virtual one has the memory that is free right now on the real GPU, or is a T4.

    Raises what the cell raises, except running out of memory; UsageError while a virtual GPU is on, for the CPU, and
    for a cell that awaits.
    """
    __tracebackhide__ = True
    cell = cell_of(shell, code, raw, names)
    tape, note = _recorded(cell, _machine(options, cell))
    tape = cpu_names.with_advice(tape, code, names, options.gpu)
    print(_answer(tape, note))
    if options.name is not None:
        shell.user_ns[options.name] = tape
    profile.show_view(tape)
    profile.write_page(tape, options)


def cell_of(shell: InteractiveShell, code: str, raw: str, names: dict[str, Any]) -> Cell:
    """Return the code below `%%memprofile` as a program; tracebacks show the lines of the notebook's cell."""
    from memexplore.run.programs.cell import Cell

    source = "\n" + shell.transform_cell(code)
    name = shell.compile.cache(source, shell.execution_count, raw)
    try:
        return Cell(source, names, name)
    except ValueError as error:
        raise UsageError(str(error).replace("run again", "run in a copy of the names")) from None


def _machine(options: Options, cell: Cell) -> Machine:
    """Return the virtual machine of the run; for a real GPU with the memory that is free there now."""
    from memexplore.run.machine import Kind, free_now
    from memexplore.virtual_gpu.device import active

    on = active()
    if on is not None:
        raise UsageError(f"--dry-run switches its own GPU on, and a virtual {on.gpu.name} is on: run %memgpu off first")
    machine = options.machine()
    if machine.kind is Kind.CPU:
        raise UsageError("--dry-run says whether a cell fits a GPU: name one such as T4, or a size")
    if machine.is_virtual:
        return machine
    return machine.with_gpu(free_now(machine.device, cell.bytes_on(machine.device)))


def _recorded(cell: Cell, machine: Machine) -> tuple[Tape, str]:
    """Return the tape of the run, and a note if it ended early or if the notebook's variables alone do not fit.

    The tape of a cell that does not fit has the whole run, as if there were room.
    """
    __tracebackhide__ = True
    from memexplore.jupyter.dropped_displays import without_displays
    from memexplore.run.programs.limit import Limit
    from memexplore.run.programs.names import VARIABLES_ALONE
    from memexplore.run.run import run

    limit = Limit(lambda steps, seconds: steps >= _STEPS and seconds > _SECONDS)
    with without_displays(), limit.limiting():
        tape = run(cell, machine=machine).tape
    if not limit.has_ended_run:
        return tape, next((note for note in tape.meta.notes if note.startswith(VARIABLES_ALONE)), "")
    note = f"The dry run was ended after {limit.steps} optimizer steps, {_SECONDS:.0f} s: later ones did not run."
    return tape.replace(meta=tape.meta._replace(notes=(*tape.meta.notes, note))), note


def _answer(tape: Tape, note: str) -> str:
    """Return the verdict on a dry run, with the op and the line at which the cell would fail."""
    from memexplore.analysis.verdict import stop_text
    from memexplore.analysis.verdict_content import verdict_content
    from memexplore.run.programs.names import VARIABLES_ALONE

    content, stops = verdict_content(tape), stop_text(tape)
    lines = [f"Dry run, no variable was changed. {content.headline}" + (f" · stops {stops}" if stops else "")]
    if stops and not note.startswith(VARIABLES_ALONE):
        lines += [f"  at {place.text}" + (f": {place.code}" if place.code else "") for place in content.where[:1]]
    return "\n".join(filter(None, [*lines, note]))
