"""Explorers of a training step and of a notebook cell: their knobs, their target, and their search."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

from memexplore.analysis.places import file_text
from memexplore.jupyter.dropped_displays import without_displays
from memexplore.jupyter.explorer import Explorer
from memexplore.jupyter.explorer_search import Stop, search_step
from memexplore.jupyter.main_thread import MainThread
from memexplore.jupyter.own_source import own_code_of
from memexplore.run.code.own_code import OwnCode
from memexplore.run.knobs.applying.on_machine import on_machine
from memexplore.run.knobs.control import Control, Explored
from memexplore.run.knobs.knobs import KNOBS, Knobs, conflicts, controls_of, hidden_in
from memexplore.run.machine import Kind, Machine, machine_of
from memexplore.run.programs.cell import Cell
from memexplore.run.programs.execution import Execution
from memexplore.run.programs.seen import BATCH_FIELDS, BatchPlace
from memexplore.run.programs.step import Step
from memexplore.run.programs.written import assigned_batch, explored
from memexplore.run.run import Run, completed, expected, run
from memexplore.run.search.search_process import Report
from memexplore.tape import Os


def explore(step: Step, gpu: str | None = None, *, release: str | None = None, os: str = Os.LINUX) -> Explorer:
    """Show a training step with its knobs; each change runs the step and draws its memory.

    `gpu` is a name of the catalogue or a size, for a virtual GPU, or ``cuda`` or ``cpu``, for a real run on this
    machine. Default: the real GPU if usable, else a virtual T4. A GPU named by the knobs is virtual. `release` is the
    torch release whose rules a virtual GPU follows. The model's state is restored after each run. The knobs can be set
    in code too: ``explorer.knobs = mx.Knobs(batch=16)``.

    >>> import torch
    >>> explorer = explore(Step(torch.nn.Linear(1024, 1024), torch.zeros(64, 1024), loss=torch.mean))
    >>> explorer.knobs = Knobs(batch=128)
    >>> explorer.run.knobs.batch, len(explorer.history)
    (128, 2)

    Raises the exceptions of the step as written, except out of memory; ValueError for an unknown GPU, and for ``cuda``
    without a GPU.
    """
    if not isinstance(step, Step):
        raise TypeError(f"explore takes mx.Step(model, batch, loss=..., optimizer=...), not {type(step).__name__}")
    machine = machine_of(gpu, release=release, os=os)

    def search(knobs: Knobs, report: Report, thread: MainThread) -> Stop:
        # Predicted on a virtual GPU like the real one: a search would fill the real one a hundred times.
        searched = on_machine(Knobs(gpu=knobs.gpu), machine).twin()
        return search_step(step, searched, report, thread, Knobs(batch=knobs.batch, input_size=knobs.input_size))

    as_written = run(step, machine=machine)
    written = explored(step, machine, as_written.tape)
    is_cpu = machine.kind is Kind.CPU
    table, hidden = _shown(written, hidden_in(written))
    return Explorer(
        lambda knobs: run(step, knobs, machine),
        table,
        expect=lambda knobs: expected(step, knobs, machine),
        step=step,
        own=own_code_of(step),
        search=None if is_cpu else search,
        no_search="A CPU has no GPU memory to fit: explore the step with gpu= the name of a GPU" if is_cpu else "",
        reasons=step.unavailable_knobs(),
        contradiction=lambda knobs: next(iter(conflicts(knobs, written)), ""),
        hidden=hidden,
        neighbours=_neighbours(machine),
        as_written=as_written,
    )


def explore_cell(
    cell: Cell,
    as_written: Execution,
    sliders: Mapping[str, list[Any]],
    machine: Machine,
    *,
    names: Mapping[str, Any] = MappingProxyType({}),
) -> Explorer:
    """Show a cell with its knobs, beginning with its run as written.

    `sliders` maps variables of the cell to their values; `names` are the variables after its run.

    Raises ValueError for a variable that the cell does not assign.
    """
    assigned = cell.assigned()
    missing = [name for name in sliders if name not in assigned]
    if missing:
        raise ValueError(f"the cell assigns no variable {missing[0]!r}; it assigns {', '.join(assigned) or 'none'}")

    def run_cell(knobs: Knobs) -> Run:
        # Jupyter would append the cell's output to whichever cell ran last.
        with without_displays():
            return completed(cell, as_written, machine) if knobs == Knobs() else run(cell, knobs, machine)

    first = run_cell(Knobs())
    with without_displays():
        unavailable = cell.unavailable_knobs()
    written = _explored(cell, {name: (values, assigned[name]) for name, values in sliders.items()}, machine, first)
    reasons = hidden_in(written) | unavailable | _batch_reasons(cell, sliders, machine)
    table, hidden = _shown(written, reasons)
    return Explorer(
        run_cell,
        table,
        own=OwnCode(cell.code, names, file_text(cell.filename)),
        no_search="The search runs in another process, without this cell: explore a Step instead",
        reasons=reasons,
        contradiction=cell.loop.contradiction,
        hidden=hidden,
        neighbours=_neighbours(machine),
        as_written=first,
    )


def _explored(
    cell: Cell, variables: Mapping[str, tuple[list[Any], Any]], machine: Machine, as_written: Run
) -> Explored:
    """Return what an explorer knows of a cell that was run."""
    made = set(() if cell.loop.seen is None else cell.loop.seen.optimizers)
    return Explored(
        machine,
        optimizer_name=made.pop() if len(made) == 1 else "",
        batch=None if cell.loop.batch is None else cell.loop.batch.size,
        tape=as_written.tape,
        variables=variables,
    )


def _batch_reasons(cell: Cell, sliders: Mapping[str, list[Any]], machine: Machine) -> dict[str, str]:
    """Return why the batch of a cell has no knob, by field, where the cell itself would allow one."""
    batch = cell.loop.batch
    if batch is not None and batch.name in sliders:
        return dict.fromkeys(BATCH_FIELDS, f"the slider {batch.name} sets it")
    if batch is not None and batch.place is BatchPlace.INPUTS and not machine.is_virtual:
        return dict.fromkeys(BATCH_FIELDS, "only a virtual GPU can give tensors that the cell makes another size")
    assigned = assigned_batch({name: value for name, value in cell.assigned().items() if name not in sliders})
    if batch is None and assigned is not None:
        name, value = assigned
        text = f"the cell sets {name} = {value}: add --slider {name}=LOW:HIGH:STEP to change it"
        return {"batch": text}
    return {}


def _shown(written: Explored, reasons: Mapping[str, str]) -> tuple[list[Control], dict[str, str]]:
    """Return the controls of the knobs without a reason, and the reasons of the others by their labels."""
    table = [control for control in controls_of(written) if control.field not in reasons]
    return table, {KNOBS[name].label: reason for name, reason in reasons.items()}


def _neighbours(machine: Machine) -> Callable[[Control, Knobs], list[Knobs]]:
    """Return the settings to run ahead: none on a real device, which other programs may need."""
    return Control.neighbours if machine.is_virtual else (lambda control, knobs: [])
