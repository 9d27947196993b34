"""A notebook cell as a value that can be run again, with other values of its variables and other knobs.

In: the source of a cell and the names of the notebook. Out: a `Trial` for some `Knobs`, and its `Outcome`.
"""

from __future__ import annotations

import ast
import contextlib
import dataclasses
from collections.abc import Callable, Iterator
from types import CodeType
from typing import Any

import torch
from torch.utils.weak import WeakIdKeyDictionary

from memexplore import capture, targets
from memexplore.dropped_prints import without_prints
from memexplore.gpu_catalogue import Gpu
from memexplore.knobs.apply import apply_to_step, training_loop_scope
from memexplore.knobs.knobs import Knobs
from memexplore.knobs.layouts import ON_ONE_GPU
from memexplore.knobs.report import ApplyReport
from memexplore.recorder.isolation import Unrelated
from memexplore.steps import real_run
from memexplore.steps.cost import Cost, measuring
from memexplore.steps.initial_state import InitialState
from memexplore.steps.out_of_memory import ending_out_of_memory
from memexplore.steps.outcome import Outcome, outcome_of
from memexplore.steps.trial import Trial, target_of
from memexplore.tape import Os
from memexplore.units import size_text

_UNAVAILABLE = {
    "batch": "a cell does not say which dimension its samples lie along",
    "accumulation": "a cell's loop is not cut into micro-batches from outside",
    "optimizer": "a cell makes its own optimizer",
    "update": "a cell makes its own optimizer",
    "zero_grad": "a cell empties its gradients itself",
    "input_size": "a cell makes its own inputs",
    "memory_format": "a cell makes its own inputs",
    "mode": "a cell calls backward itself",
    "frozen": "a cell makes its optimizer before its model is first called",
    "lora": "a cell makes its optimizer before its model is first called",
    **dict.fromkeys(ON_ONE_GPU, "a cell wraps its model itself"),
    "gpus": "a cell makes its process group itself: mx.Step runs on several GPUs",
}
_SEQUENCES = (ast.Tuple, ast.List)
VARIABLES_ALONE = "The notebook's variables alone"
"""Beginning of the note of a tape on whose GPU the notebook's variables do not fit."""


class CellEnded(BaseException):
    """Ends the run of a cell as if it had come to its end. A BaseException, so that `except Exception` cannot catch it.

    The check of `cost.interruptible` may raise it.
    """


@dataclasses.dataclass(frozen=True, eq=False)
class Cell:
    """The source of a notebook cell and the names that it uses.

    `namespace` is copied (the dictionary, not its values). `filename` is the name of the cell in stacks.
    A run is undone: modules, optimizers, schedulers and gradient scalers of the namespace, the random states and the
    names are restored. A run does not undo files that the cell writes, iterators and generators of earlier cells that
    it advances, changes of other objects of earlier cells (a list it appends to, a tensor it writes into on a real
    device), and CPU code beside a virtual GPU, which runs for real.

    >>> cell = Cell("size = 1000\\nx = torch.zeros(size, device='cuda')", {"torch": torch})
    >>> from memexplore.analysis import curves
    >>> [curves.peak(cell.run(knobs).tape)[0] for knobs in (Knobs(), Knobs(variables={"size": 2000}))]
    [4096, 8192]

    Raises SyntaxError for a source that is not Python, ValueError for a cell that awaits.
    """

    code: str
    namespace: dict[str, Any] = dataclasses.field(repr=False)
    filename: str = "<cell>"
    _initial: InitialState = dataclasses.field(init=False, repr=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "namespace", dict(self.namespace))
        try:
            compile(self.code, self.filename, "exec", dont_inherit=True)
        except SyntaxError as error:
            if "await" in self.code and "outside" in str(error):
                raise ValueError("a cell that awaits cannot be run again: take the await out of it") from None
            raise
        object.__setattr__(self, "_initial", InitialState(self.namespace))

    def assigned(self) -> dict[str, Any]:
        """Return the variables that the cell assigns outside of functions; the value of a literal, else None.

        >>> Cell("batch = 8\\nfor epoch in range(2): rate = 0.1 * epoch", {}).assigned()
        {'batch': 8, 'rate': None}
        """
        names: dict[str, Any] = {}
        for name, value in _assignments(ast.parse(self.code)):
            try:
                names.setdefault(name, ast.literal_eval(value))
            except ValueError:
                names.setdefault(name, None)
        return names

    def unavailable_knobs(self) -> dict[str, str]:
        """Return the fields of `Knobs` that do not apply to a cell, each with the reason.

        >>> Cell("x = 1", {}).unavailable_knobs()["optimizer"]
        'a cell makes its own optimizer'
        """
        return dict(_UNAVAILABLE)

    def run(
        self,
        knobs: Knobs | None = None,
        *,
        gpu: str | Gpu | None = None,
        release: str | None = None,
        os: str = Os.LINUX,
    ) -> Trial:
        """Run the cell with some knobs on a new virtual GPU or on a real device.

        `gpu`, `release` and `os` are as in `trial.run`. Default: the real GPU if usable, else a virtual T4.

        What the notebook has on a real GPU is put on the virtual one first; where it does not fit, the tape ends there,
        with a note that begins with `VARIABLES_ALONE`.

        The knobs of a model are applied to every model at its first call. The output of the cell is dropped. On a real
        device neither FLOPs nor time are measured: a cell is not one step.

        Raises what the cell raises, except running out of memory; ValueError for a knob of `unavailable_knobs`, and for
        a variable that the cell does not assign.
        """
        knobs = knobs or Knobs()
        for name in knobs.changed():
            if name in _UNAVAILABLE:
                raise ValueError(f"{name} cannot be changed in a cell: {_UNAVAILABLE[name]}; explore a Step instead")
        program = compile(with_values(self.code, dict(knobs.variables)), self.filename, "exec", dont_inherit=True)
        target = target_of(knobs, gpu)
        if isinstance(target, str) and targets.is_real(target):
            return self._run_on_real_device(program, knobs, targets.real_device(target, release))
        names, applied, are_moved = dict(self.namespace), ApplyReport(), False
        with (
            self._initial.restored(),
            capture.virtual(target, release=release, settings=knobs.settings or "", os=os) as device,
            contextlib.ExitStack() as stack,
        ):
            with capture.record() as recording, measuring(device.mode) as meter:
                with ending_out_of_memory(recording):
                    self._initial.put_on_virtual_gpu(names)
                    are_moved = True
                if are_moved:
                    applied = executed(program, names, knobs, stack, torch.device("cuda"), recording)
            names.clear()
        tape = recording.tape
        if not are_moved:
            size = size_text(self._initial.bytes_on_real_gpus(self.namespace))
            note = f"{VARIABLES_ALONE} need {size}, and do not fit: the cell did not run."
            tape = tape.replace(meta=tape.meta._replace(notes=(*tape.meta.notes, note)))
        return Trial(knobs, tape, applied, meter.total())

    def _run_on_real_device(self, program: CodeType, knobs: Knobs, device: torch.device) -> Trial:
        names = dict(self.namespace)
        with (
            real_run.preserve_device(device),
            self._initial.restored(),
            self._initial.preserve_values(),
            contextlib.ExitStack() as stack,
        ):
            with capture.record(device, Unrelated.DROPPED) as recording:
                applied = executed(program, names, knobs, stack, device, recording)
            names.clear()
        return Trial(knobs, recording.tape, applied, Cost())

    def bytes_on(self, device: torch.device) -> int:
        """Return the bytes of the namespace's models, gradients, optimizer states and tensors on a real GPU."""
        return targets.bytes_on(device, self._initial.tensors(self.namespace))

    def run_outcome(
        self,
        knobs: Knobs | None = None,
        *,
        gpu: str | None = None,
        release: str | None = None,
        os: str = Os.LINUX,
        trial: Trial | None = None,
    ) -> tuple[Trial, Outcome]:
        """Run the cell with some knobs, and a second time with unlimited memory if it does not fit.

        `trial` is an earlier trial of the same knobs, which is then not run again. Raises as `run` does.
        """
        return outcome_of(
            lambda setting, on: self.run(setting, gpu=on, release=release, os=os),
            knobs or Knobs(),
            gpu,
            samples=1,
            trial=trial,
        )


def executed(
    program: CodeType,
    names: dict[str, Any],
    knobs: Knobs,
    stack: contextlib.ExitStack,
    device: torch.device,
    recording: capture.Recording,
) -> ApplyReport:
    """Run a program with knobs on its models, to its end or out of memory; closing `stack` restores the models."""
    reports: list[ApplyReport] = []
    with (
        _at_first_calls(lambda model: reports.append(stack.enter_context(apply_to_step(knobs, model)))),
        without_prints(),
        ending_out_of_memory(recording),
        contextlib.suppress(CellEnded),
        training_loop_scope(knobs, device),
    ):
        exec(program, names)
        reports = [report.completed() for report in reports]
    return sum(reports, ApplyReport()).without_pending()


def _assignments(tree: ast.AST) -> Iterator[tuple[str, ast.expr]]:
    """Yield name and value of every assignment outside of functions and classes."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef | ast.Lambda):
            continue
        if isinstance(node, ast.Assign):
            for target in node.targets:
                yield from _pairs(target, node.value)
        elif isinstance(node, ast.AnnAssign) and node.value is not None:
            yield from _pairs(node.target, node.value)
        yield from _assignments(node)


def _pairs(target: ast.expr, value: ast.expr) -> Iterator[tuple[str, ast.expr]]:
    if isinstance(target, ast.Name):
        yield target.id, value
        return
    if not isinstance(target, _SEQUENCES) or not isinstance(value, _SEQUENCES):
        return
    if len(target.elts) != len(value.elts) or any(isinstance(one, ast.Starred) for one in target.elts):
        return
    for name, part in zip(target.elts, value.elts, strict=True):
        yield from _pairs(name, part)


def with_values(code: str, values: dict[str, Any]) -> ast.Module:
    """Return the syntax tree of the cell with other values in the assignments of some variables."""
    tree = ast.parse(code)
    assignments = list(_assignments(tree))
    for name in values:
        if name not in dict(assignments):
            assigned = ", ".join(dict.fromkeys(name for name, _ in assignments)) or "none"
            raise ValueError(f"the cell assigns no variable {name!r}; it assigns {assigned}")
    replaced = {id(expression): values[name] for name, expression in assignments if name in values}

    class Replacing(ast.NodeTransformer):
        def visit(self, node: ast.AST) -> ast.AST:
            if id(node) not in replaced:
                return self.generic_visit(node)
            return ast.copy_location(ast.parse(repr(replaced[id(node)]), mode="eval").body, node)

    Replacing().visit(tree)
    return ast.fix_missing_locations(tree)


@contextlib.contextmanager
def _at_first_calls(prepare: Callable[[torch.nn.Module], Any]) -> Iterator[None]:
    """Call a function with each model, a module with parameters that no other module calls, before its first call."""
    seen = WeakIdKeyDictionary()
    original = torch.nn.Module.__call__
    depth = 0

    def call(self: torch.nn.Module, *args: Any, **kwargs: Any) -> Any:
        nonlocal depth
        if not depth and self not in seen and next(self.parameters(), None) is not None:
            # In the backward pass a checkpoint calls layers of the model, and no module calls these.
            seen.update(dict.fromkeys(self.modules()))
            prepare(self)
        depth += 1
        try:
            return original(self, *args, **kwargs)
        finally:
            depth -= 1

    torch.nn.Module.__call__ = call  # type: ignore[method-assign]
    try:
        yield
    finally:
        torch.nn.Module.__call__ = original  # type: ignore[method-assign]
