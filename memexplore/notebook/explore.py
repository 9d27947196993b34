"""Explorers of a training step and of a notebook cell: their controls, their target, and their search."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from IPython.utils.capture import capture_output

from memexplore import targets
from memexplore.knobs.knobs import Knobs
from memexplore.notebook import controls
from memexplore.notebook.controls import Control
from memexplore.notebook.explorer import Explorer
from memexplore.notebook.explorer_layout import LAYER_FIELDS
from memexplore.search.advise import Advice, advise
from memexplore.search.progress import Progress
from memexplore.steps.cell import Cell
from memexplore.steps.outcome import Outcome, run_outcome
from memexplore.steps.step import Step
from memexplore.steps.trial import Trial
from memexplore.tape import Os

_NO_ALLOCATOR = "a CPU has no caching allocator"


def explore(step: Step, gpu: str | None = None, *, release: str | None = None, os: str = Os.LINUX) -> Explorer:
    """Show a training step with controls for its knobs; each change runs the step and draws its memory.

    `gpu` is a name of the catalogue or a size, for a virtual GPU, or ``cuda`` or ``cpu``, for a real run on this
    machine. Default: the real GPU if usable, else a virtual T4. A GPU named by the knobs is virtual. `release` is the
    torch release whose rules a virtual GPU follows. The model's state is restored after each run. The knobs can be set
    in code too: ``explorer.knobs = mx.Knobs(batch=16)``.

    >>> import torch
    >>> explorer = explore(Step(torch.nn.Linear(1024, 1024), torch.zeros(64, 1024), loss=torch.mean))
    >>> explorer.knobs = Knobs(batch=128)
    >>> explorer.trial.knobs.batch, len(explorer.history)
    (128, 2)

    Raises the exceptions of the step as written, except out of memory; ValueError for an unknown GPU, and for ``cuda``
    without a GPU.
    """
    if not isinstance(step, Step):
        raise TypeError(f"explore takes mx.Step(model, batch, loss=..., optimizer=...), not {type(step).__name__}")
    target = gpu or targets.default_target()
    panels = _panels(step, target)
    disabled = _disabled(target)
    if not step.input_size:
        disabled["input_size"] = "this batch has neither images nor sequences"

    def run(knobs: Knobs) -> tuple[Trial, Outcome]:
        return run_outcome(step, knobs, gpu=target, release=release, os=os)

    def search(knobs: Knobs, report: Callable[[Progress], object]) -> Advice:
        # Predicted on a virtual GPU like the real one: a search would fill the real one a hundred times.
        return advise(step, knobs.gpu or targets.gpu_of(target).key, release=release, os=os, progress=report)

    if target == targets.CPU:
        disabled["advise"] = "a CPU has no GPU memory to fit: explore the step with gpu= the name of a GPU"
    usable_search = None if "advise" in disabled else search
    return Explorer(run, panels, step=step, search=usable_search, disabled=disabled, neighbours=_neighbours(target))


def explore_cell(
    cell: Cell,
    as_written: Trial,
    sliders: Mapping[str, list[Any]],
    gpu: str | None = None,
    *,
    release: str | None = None,
    os: str = Os.LINUX,
) -> Explorer:
    """Show a cell with controls for its knobs, beginning with its run as written.

    `sliders` maps variables of the cell to their values. `gpu`, `release` and `os` are as for `explore`.

    Raises ValueError for a variable that the cell does not assign, and for an unknown GPU.
    """
    target = gpu or targets.default_target()
    disabled = (
        cell.unavailable_knobs() | _disabled(target) | {"advise": "a cell has no batch and no optimizer to search with"}
    )
    assigned = cell.assigned()
    missing = [name for name in sliders if name not in assigned]
    if missing:
        raise ValueError(f"the cell assigns no variable {missing[0]!r}; it assigns {', '.join(assigned) or 'none'}")
    panels = {
        "Variables": [controls.variable_control(name, values, assigned[name]) for name, values in sliders.items()]
    }
    panels |= _panels(None, target)

    def run(knobs: Knobs) -> tuple[Trial, Outcome]:
        # Jupyter would append the cell's output to whichever cell ran last.
        with capture_output():
            trial = as_written if knobs == Knobs() else None
            return cell.run_outcome(knobs, gpu=target, release=release, os=os, trial=trial)

    with_controls = {title: panel for title, panel in panels.items() if panel}
    return Explorer(run, with_controls, disabled=disabled, neighbours=_neighbours(target))


def _panels(step: Step | None, target: str) -> dict[str, list[Control]]:
    lines = [controls.layers_control(field, label) for field, label in LAYER_FIELDS.items()]
    return {
        "Model": controls.model_controls(),
        "Batch": controls.batch_controls(step),
        "Optimizer": controls.optimizer_controls(),
        "Layers": [*lines, controls.rank_control()],
        "GPU and allocator": controls.device_controls(target),
    }


def _disabled(target: str) -> dict[str, str]:
    """Return fields of `Knobs` that a target does not have, with the reason."""
    return {"settings": _NO_ALLOCATOR} if target == targets.CPU else {}


def _neighbours(target: str) -> Callable[[Control, Knobs], list[Knobs]]:
    """Return the settings to run ahead: none on a real device, which other programs may need."""
    return (lambda control, knobs: []) if targets.is_real(target) else Control.neighbours
