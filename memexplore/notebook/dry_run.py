"""Dry run of a cell: on a virtual GPU only and in a copy of the notebook's names, to say whether the cell will fit.

In: the options and the code of a cell. Out: its Tape, shown with the verdict; no variable of the notebook is changed.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from IPython.core.error import UsageError
from IPython.core.interactiveshell import InteractiveShell

from memexplore.notebook import cpu_names, profile
from memexplore.notebook.options import Options
from memexplore.tape import Os

if TYPE_CHECKING:
    from memexplore.gpu_catalogue import Gpu
    from memexplore.steps.cell import Cell
    from memexplore.tape import Tape

_SECONDS, _STEPS = 20.0, 3
"""The run ends after these seconds, if so many optimizer steps have ended: later ones are like them."""


def dry_run(shell: InteractiveShell, options: Options, code: str, raw: str, names: dict[str, Any]) -> None:
    """Run a cell in a copy of `names` and on a virtual GPU, and show whether it fits; `raw` is the text of the cell.

    Without a GPU in the options, it is the real GPU with the memory that is free there right now, or else a T4.

    Raises what the cell raises, except running out of memory; UsageError while a virtual GPU is on, for the CPU, and
    for a cell that awaits.
    """
    __tracebackhide__ = True
    cell = _cell(shell, code, raw, names)
    gpu = _gpu(options, cell)
    tape, note = _recorded(cell, gpu, options)
    tape = cpu_names.with_advice(tape, code, names, options.gpu)
    print(_answer(tape, note))
    if options.name is not None:
        shell.user_ns[options.name] = tape
    profile.show_view(tape)
    profile.write_page(tape, options)


def _cell(shell: InteractiveShell, code: str, raw: str, names: dict[str, Any]) -> Cell:
    """Return the cell below its first line, with its line numbers and its file name in tracebacks."""
    from memexplore.steps.cell import Cell

    source = "\n" + shell.transform_cell(code)
    name = shell.compile.cache(source, shell.execution_count, raw)
    try:
        return Cell(source, names, name)
    except ValueError as error:
        raise UsageError(str(error).replace("run again", "run in a copy of the names")) from None


def _gpu(options: Options, cell: Cell) -> Gpu:
    """Return the virtual GPU of the run; for the real one that with what is free there now."""
    from memexplore import targets
    from memexplore.virtual_gpu.device import active

    on = active()
    if on is not None:
        raise UsageError(f"--dry-run switches its own GPU on, and a virtual {on.gpu.name} is on: run %memgpu off first")
    name = options.gpu or targets.default_target()
    if name == targets.CPU:
        raise UsageError("--dry-run says whether a cell fits a GPU: name one such as T4, or a size")
    if name != targets.CUDA:
        return profile.find_gpu(name)
    try:
        device = targets.real_device(name, options.release)
    except ValueError as error:
        raise UsageError(str(error)) from None
    return targets.free_now(device, cell.bytes_on(device))


def _recorded(cell: Cell, gpu: Gpu, options: Options) -> tuple[Tape, str]:
    """Return the tape of the run and a note if the run was ended early, or was none: without room for the variables.

    The tape of a cell that does not fit has the whole run, as if there were room.
    """
    __tracebackhide__ = True
    from memexplore import capture
    from memexplore.analysis.picture import with_whole
    from memexplore.notebook.dropped_displays import without_displays
    from memexplore.steps.cell import VARIABLES_ALONE, CellEnded
    from memexplore.steps.cost import interruptible
    from memexplore.steps.out_of_memory import fits

    system, release = options.os or Os.LINUX, options.release
    limit = _Limit()
    with without_displays(), limit.counting(), interruptible(limit.check):
        tape = cell.run(gpu=gpu, release=release, os=system).tape
    note = next((each for each in tape.meta.notes if each.startswith(VARIABLES_ALONE)), "")
    if limit.ended:
        note = f"The dry run was ended after {limit.steps} optimizer steps, {_SECONDS:.0f} s: later ones did not run."
        tape = tape.replace(meta=tape.meta._replace(notes=(*tape.meta.notes, note)))
    if fits(tape):
        return tape, note
    ops = capture.OpLimit(tape, CellEnded)
    with contextlib.suppress(Exception), without_displays(), interruptible(ops.check):
        whole = cell.run(gpu=capture.unlimited(gpu), release=release, os=system).tape
        if not ops.is_exceeded:
            return with_whole(tape, whole), note
    return tape, note


class _Limit:
    """Ends a run that has taken long enough, where its steps show what later ones need."""

    def __init__(self) -> None:
        self.steps = 0
        self.ended = False
        self._end = time.monotonic() + _SECONDS

    @contextlib.contextmanager
    def counting(self) -> Iterator[None]:
        """Count the steps of all optimizers in the block."""
        from torch.optim.optimizer import register_optimizer_step_post_hook

        def count(*_: Any) -> None:
            self.steps += 1

        handle = register_optimizer_step_post_hook(count)
        try:
            yield
        finally:
            handle.remove()

    def check(self) -> None:
        """Raise CellEnded when the run has taken long enough; called before every op."""
        from memexplore.steps.cell import CellEnded

        if self.steps >= _STEPS and time.monotonic() > self._end:
            self.ended = True
            raise CellEnded


def _answer(tape: Tape, note: str) -> str:
    """Return the verdict on a dry run, with the op and the line at which the cell would fail."""
    from memexplore.analysis.verdict import stop_text
    from memexplore.analysis.verdict_content import verdict_content
    from memexplore.steps.cell import VARIABLES_ALONE

    found, stops = verdict_content(tape), stop_text(tape)
    lines = [f"Dry run, no variable was changed. {found.headline}" + (f" · stops {stops}" if stops else "")]
    if stops and not note.startswith(VARIABLES_ALONE):
        lines += [f"  at {place.text}" + (f": {place.code}" if place.code else "") for place in found.where[:1]]
    return "\n".join(filter(None, [*lines, note]))
