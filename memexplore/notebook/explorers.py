"""Explorers of a step and of a notebook cell: which knobs they have, where they run, and who advises."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from IPython.utils.capture import capture_output

from memexplore import targets
from memexplore.knobs.knobs import Knobs
from memexplore.notebook import controls
from memexplore.notebook.controls import Control
from memexplore.notebook.explorer import OF_LAYERS, Explorer
from memexplore.search.advise import Advice, advise
from memexplore.search.sweep import Progress
from memexplore.steps.cell import Cell
from memexplore.steps.outcome import Outcome, run_outcome
from memexplore.steps.step import Step
from memexplore.steps.trial import Trial

_NO_ALLOCATOR = "a CPU has no caching allocator"


def explore(step: Step, gpu: str | None = None, *, release: str | None = None) -> Explorer:
    """Turn the knobs of a training step, and see at once what becomes of its memory.

    Every setting is run: on a virtual GPU, where `gpu` is a name of the catalogue or a size, or for real on this
    machine's GPU (``cuda``) or CPU (``cpu``). Default device: the real GPU if usable, else a virtual T4. A GPU that the
    knobs name is virtual. `release` is the torch release whose rules apply on a virtual GPU. The model
    comes back as it was. The knobs can be set from code too: ``explorer.knobs = mx.Knobs(batch=16)``.

    >>> import torch
    >>> explorer = explore(Step(torch.nn.Linear(1024, 1024), torch.zeros(64, 1024), loss=torch.mean))
    >>> explorer.knobs = Knobs(batch=128)
    >>> explorer.trial.knobs.batch, len(explorer.history)
    (128, 2)

    Raises what the step raises as it is written, but for running out of memory; ValueError for an unknown GPU, and for
    ``cuda`` where there is none.
    """
    if not isinstance(step, Step):
        raise TypeError(f"explore takes mx.Step(model, batch, loss=..., optimizer=...), not {type(step).__name__}")
    place = gpu or targets.default_target()
    panels = _panels(step, place)
    greyed = _greyed(place)
    if not step.input_size:
        greyed["input_size"] = "this batch has neither images nor sequences"

    def run(knobs: Knobs) -> tuple[Trial, Outcome]:
        return run_outcome(step, knobs, gpu=place, release=release)

    def search(knobs: Knobs, told: Callable[[Progress], object]) -> Advice:
        # Advice is predicted: on a virtual GPU like the real one, whose memory nobody fills a hundred times.
        return advise(step, knobs.gpu or targets.gpu_of(place).key, release=release, progress=told)

    if place == targets.CPU:
        greyed["advise"] = "advice is what fits a GPU: explore the step with gpu= the name of one"
    asked = None if "advise" in greyed else search
    return Explorer(run, panels, step=step, search=asked, greyed=greyed, neighbours=_neighbours(place))


def explore_cell(
    cell: Cell, known: Trial, sliders: Mapping[str, list[Any]], gpu: str | None = None, *, release: str | None = None
) -> Explorer:
    """Turn the knobs of a cell that was run as written (`known`); `sliders` are the values of variables of the cell.

    `gpu` is a place as for `explore`.

    Raises ValueError for a variable that the cell does not assign, or an unknown GPU.
    """
    place = gpu or targets.default_target()
    greyed = cell.greyed() | _greyed(place) | {"advise": "a cell has no batch and no optimizer to search with"}
    own = cell.assigned()
    missing = [name for name in sliders if name not in own]
    if missing:
        raise ValueError(f"the cell assigns no variable {missing[0]!r}; it assigns {', '.join(own) or 'none'}")
    panels = {"Variables": [controls.of_variable(name, values, own[name]) for name, values in sliders.items()]}
    panels |= _panels(None, place)

    def run(knobs: Knobs) -> tuple[Trial, Outcome]:
        # What a cell displays would appear below whatever cell ran last.
        with capture_output():
            return cell.run_outcome(knobs, gpu=place, release=release, trial=known if knobs == Knobs() else None)

    shown = {title: panel for title, panel in panels.items() if panel}
    return Explorer(run, shown, greyed=greyed, neighbours=_neighbours(place))


def _panels(step: Step | None, place: str) -> dict[str, list[Control]]:
    return {
        "Model": controls.of_model(),
        "Batch": controls.of_batch(step),
        "Optimizer": controls.of_optimizer(),
        "Layers": [*(controls.layers_text(field, text) for field, text in OF_LAYERS.items()), controls.rank()],
        "GPU and allocator": controls.of_device(place),
    }


def _greyed(place: str) -> dict[str, str]:
    """Fields of `Knobs` that a place does not have, and why."""
    return {"settings": _NO_ALLOCATOR} if place == targets.CPU else {}


def _neighbours(place: str) -> Callable[[Control, Knobs], list[Knobs]]:
    """The settings that are run ahead of being wanted: none on a real device, which its user may want for himself."""
    return (lambda control, knobs: []) if targets.is_real(place) else Control.neighbours
