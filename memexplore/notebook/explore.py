"""Explorers of a training step and of a notebook cell: their knobs, their target, and their search."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

from memexplore import targets
from memexplore.analysis.places import file_text
from memexplore.codegen.own_code import OwnCode
from memexplore.knobs.adapters import is_linear
from memexplore.knobs.conflicts import conflicts
from memexplore.knobs.knobs import Knobs
from memexplore.knobs.layouts import ON_ONE_GPU
from memexplore.notebook.dropped_displays import without_displays
from memexplore.notebook.explorer import Explorer
from memexplore.notebook.explorer_search import Stop, search_step
from memexplore.notebook.knob import Knob
from memexplore.notebook.knob_table import knob_table, variable_knob
from memexplore.notebook.main_thread import MainThread
from memexplore.notebook.own_source import own_code_of
from memexplore.notebook.results import Result
from memexplore.search.beside import Report
from memexplore.steps import batches, optimizers, tensor_parallel
from memexplore.steps.cell import Cell
from memexplore.steps.expected import expected_tape
from memexplore.steps.outcome import Outcome, run_drawn, run_outcome
from memexplore.steps.step import Step
from memexplore.steps.step_record import built_model
from memexplore.steps.trial import Trial
from memexplore.steps.written import assigned_batch, written_optimizer, written_texts
from memexplore.tape import Os, Tape

_NO_ALLOCATOR = "a CPU has no caching allocator"
_LABELS = {"batch": "Batch", "accumulation": "Micro-batches", "input_size": "Input size"}
"""Knobs that the table of a step or a cell may not have."""


def explore(step: Step, gpu: str | None = None, *, release: str | None = None, os: str = Os.LINUX) -> Explorer:
    """Show a training step with its knobs; each change runs the step and draws its memory.

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
    targets.gpu_of(target)

    def run(knobs: Knobs) -> tuple[Trial, Outcome]:
        return run_drawn(step, knobs, gpu=target, release=release, os=os)

    def finish(knobs: Knobs) -> tuple[Trial, Outcome]:
        return run_outcome(step, knobs, gpu=target, release=release, os=os)

    def search(knobs: Knobs, report: Report, thread: MainThread) -> Stop:
        # Predicted on a virtual GPU like the real one: a search would fill the real one a hundred times.
        name = knobs.gpu or targets.gpu_of(target).key
        base = Knobs(batch=knobs.batch, input_size=knobs.input_size)
        return search_step(step, name, report, thread, release=release, os=os, base=base)

    def expect(knobs: Knobs) -> Tape | None:
        return expected_tape(step, knobs, gpu=target, release=release, os=os)

    as_written = Result(*run(Knobs()))
    table = knob_table(step, target, written_texts(step, built_model(step), as_written.trial.tape))
    is_cpu = target == targets.CPU
    table, hidden = _without(table, _hidden(step, target))
    return Explorer(
        run,
        table,
        finish=finish,
        expect=expect,
        step=step,
        own=own_code_of(step),
        search=None if is_cpu else search,
        no_search="A CPU has no GPU memory to fit: explore the step with gpu= the name of a GPU" if is_cpu else "",
        reasons=_reasons(step),
        contradiction=_contradiction(step),
        hidden=hidden,
        neighbours=_neighbours(target),
        as_written=as_written,
    )


def explore_cell(
    cell: Cell,
    as_written: Trial,
    sliders: Mapping[str, list[Any]],
    gpu: str | None = None,
    *,
    release: str | None = None,
    os: str = Os.LINUX,
    names: Mapping[str, Any] = MappingProxyType({}),
) -> Explorer:
    """Show a cell with its knobs, beginning with its run as written.

    `sliders` maps variables of the cell to their values; `names` are the variables after its run. `gpu`, `release` and
    `os` are as for `explore`.

    Raises ValueError for a variable that the cell does not assign, and for an unknown GPU.
    """
    target = gpu or targets.default_target()
    assigned = cell.assigned()
    missing = [name for name in sliders if name not in assigned]
    if missing:
        raise ValueError(f"the cell assigns no variable {missing[0]!r}; it assigns {', '.join(assigned) or 'none'}")
    reasons = {**cell.unavailable_knobs(), **_hidden_by_target(target)}
    reasons["lora_rank"] = reasons["lora"]
    batch = assigned_batch({name: value for name, value in assigned.items() if name not in sliders})
    if batch is not None:
        name, value = batch
        reasons["batch"] = f"the cell sets {name} = {value}: add --slider {name}=LOW:HIGH:STEP to change it"
    variables = [variable_knob(name, values, assigned[name]) for name, values in sliders.items()]
    table, hidden = _without(knob_table(None, target, {}), reasons)

    def run(knobs: Knobs) -> tuple[Trial, Outcome]:
        # Jupyter would append the cell's output to whichever cell ran last.
        with without_displays():
            trial = as_written if knobs == Knobs() else None
            return cell.run_outcome(knobs, gpu=target, release=release, os=os, trial=trial)

    return Explorer(
        run,
        [*variables, *table],
        own=OwnCode(cell.code, names, file_text(cell.filename)),
        no_search="A cell has no batch and no optimizer to search with: explore a Step instead",
        reasons=reasons,
        contradiction=lambda knobs: next(iter(conflicts(knobs)), ""),
        hidden=hidden,
        neighbours=_neighbours(target),
    )


def _without(table: list[Knob], reasons: Mapping[str, str]) -> tuple[list[Knob], dict[str, str]]:
    """Return the knobs without those of some fields, and the reasons by the labels of these."""
    hidden = {_LABELS[field]: reasons[field] for field in _LABELS if field in reasons}
    hidden |= {knob.label: reasons[knob.field] for knob in table if knob.field in reasons}
    return [knob for knob in table if knob.field not in reasons], hidden


def _hidden(step: Step, target: str) -> dict[str, str]:
    """Return fields of `Knobs` that do not apply to a step, with the reason."""
    found, model = _hidden_by_target(target), built_model(step)
    if not any(weight.dim() == 4 for weight in model.parameters()):
        found["memory_format"] = "the model has no weights for images"
    if not any(is_linear(module) for module in model.modules()):
        found |= dict.fromkeys(("lora", "lora_rank"), "the model has no linear layer")
    if step.input_size is None:
        found["input_size"] = "this batch has neither images nor sequences"
    if reason := tensor_parallel.why_not(model):
        found["tensor_parallel"] = reason
    return found


def _hidden_by_target(target: str) -> dict[str, str]:
    if target != targets.CPU:
        return {}
    return {"settings": _NO_ALLOCATOR, **dict.fromkeys(ON_ONE_GPU, "a CPU is one device: name a GPU")}


def _reasons(step: Step) -> dict[str, str]:
    """Return why knobs of a step cannot be set, by name."""
    along_first = any(tensor.dim() and tensor.shape[0] == step.batch_size for tensor in batches.tensors(step.batch))
    if step.resize is None and not along_first:
        text = "the samples do not lie along the first dimension: give Step(..., resize=function of batch and samples)"
        return {"batch": text, "accumulation": text}
    return {}


def _contradiction(step: Step) -> Callable[[Knobs], str]:
    """Return a function of a setting: why it contradicts itself or the step's optimizer, empty if it does not."""
    written = written_optimizer(step)

    def reason(knobs: Knobs) -> str:
        chosen = optimizers.KINDS.get(knobs.optimizer)
        kind: Any = chosen[0] if chosen is not None else type(written)
        try:
            if chosen is not None or written is not None:
                optimizers.update_settings(kind, knobs.update)
        except ValueError as error:
            return str(error)
        return next(iter(conflicts(knobs)), "")

    return reason


def _neighbours(target: str) -> Callable[[Knob, Knobs], list[Knobs]]:
    """Return the settings to run ahead: none on a real device, which other programs may need."""
    return (lambda knob, knobs: []) if targets.is_real(target) else Knob.neighbours
