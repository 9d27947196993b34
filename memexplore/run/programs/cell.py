"""A notebook cell as a program: it can be run again, with other values of its variables and other knobs."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable
from typing import Any

import cloudpickle
import torch

from memexplore.recorder.isolation import Unrelated
from memexplore.recorder.recording import record
from memexplore.run.code.variables import assigned, with_values
from memexplore.run.knobs.knobs import Knobs
from memexplore.run.machine import DEFAULT_VIRTUAL, Machine, machine_of
from memexplore.run.programs.acting import Plan
from memexplore.run.programs.cost import measuring
from memexplore.run.programs.execution import Execution
from memexplore.run.programs.loop import Loop, Ran, ran
from memexplore.run.programs.names import NotebookNames, PackedNames
from memexplore.run.programs.out_of_memory import ending_out_of_memory
from memexplore.run.programs.packing import CellPickler


@dataclasses.dataclass(frozen=True, eq=False)
class Cell:
    """The source of a notebook cell and the names that it uses.

    `names` are those of a notebook, of which the dictionary is copied and not its values, or a packed copy, for a
    virtual GPU only. `filename` is the name of the cell in stacks.
    A run is undone: modules, optimizers, schedulers and gradient scalers of the notebook, the random states and the
    names are restored. A run does not undo files that the cell writes, iterators and generators of earlier cells that
    it advances, changes of other objects of earlier cells (a list it appends to, a tensor it writes into on a real
    device), and CPU code beside a virtual GPU, which runs for real. A packed copy is made anew for each run.

    >>> cell = Cell("size = 1000\\nx = torch.zeros(size, device='cuda')", {"torch": torch})
    >>> from memexplore.analysis import curves
    >>> from memexplore.run.machine import machine_of
    >>> settings = Knobs(), Knobs(variables={"size": 2000})
    >>> [curves.peak(cell.execute(knobs, machine_of("T4")).tape)[0] for knobs in settings]
    [4096, 8192]

    Raises SyntaxError for a source that is not Python, ValueError for a cell that awaits.
    """

    code: str
    names: dataclasses.InitVar[dict[str, Any] | NotebookNames | PackedNames]
    filename: str = "<cell>"
    loop: Loop = dataclasses.field(init=False, repr=False)
    """What runs as written have shown of the training loop. `loop.watching()` is a block for such a run by others."""
    _names: NotebookNames | PackedNames = dataclasses.field(init=False, repr=False)

    def __post_init__(self, names: dict[str, Any] | NotebookNames | PackedNames) -> None:
        try:
            compile(self.code, self.filename, "exec", dont_inherit=True)
        except SyntaxError as error:
            if "await" in self.code and "outside" in str(error):
                raise ValueError("a cell that awaits cannot be run again: take the await out of it") from None
            raise
        object.__setattr__(self, "_names", NotebookNames(names) if isinstance(names, dict) else names)
        object.__setattr__(self, "loop", Loop("this cell", lambda seen: self.assigned()))

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.code, self._names, self.filename)

    def packed(self, pickler: type[CellPickler] = CellPickler, most_steps: int | None = None) -> bytes:
        """Return the cell with a copy of the names that it reads as bytes, for another process.

        Each of its runs ends after `most_steps` of all optimizers.

        Raises `UnsendableCellError` with the reason where a name cannot be copied.
        """
        return cloudpickle.dumps(Cell(self.code, self._names.packed(self.code, pickler, most_steps), self.filename))

    @property
    def may_be_endless(self) -> bool:
        """Whether the cell may go on for ever where it has the memory."""
        return self._names.may_be_endless

    def assigned(self) -> dict[str, Any]:
        """Return the variables that the cell assigns outside of functions; the value of a literal, else None."""
        return assigned(self.code)

    def unavailable_knobs(self) -> dict[str, str]:
        """Return the fields of `Knobs` that do not apply to the cell, each with the reason.

        Where the cell was not run yet, it is run until its second update, on a virtual GPU.

        >>> Cell("x = 1", {}).unavailable_knobs()["optimizer"]
        'this cell makes no optimizer'
        """
        return self.loop.unavailable(self._observe(machine_of(DEFAULT_VIRTUAL)))

    def execute(self, knobs: Knobs, machine: Machine) -> Execution:
        """Execute the cell with some knobs on a new virtual GPU or on a real device.

        What the notebook has on a real GPU is put on the virtual one first; where it does not fit, the tape ends there,
        with a note that begins with `names.VARIABLES_ALONE`.

        The knobs of a model are applied to every model at its first call, those of the loop where the cell makes its
        DataLoader and its optimizer; what a run as written has not shown yet, another run shows first. The output of
        the cell is dropped. On a real device neither FLOPs nor time are measured: a cell is not one step.

        Raises what the cell raises, except running out of memory; ValueError for a knob that cannot act, and for a
        variable that the cell does not assign; TimeoutError for a packed cell that runs for too long.
        """
        plan = self.loop.plan(knobs, self._observe(machine), is_virtual=machine.is_virtual)
        return self._run(plan, machine, self.loop.watching() if knobs == Knobs() else contextlib.nullcontext())

    def _observe(self, machine: Machine) -> Callable[[contextlib.AbstractContextManager[Any]], object]:
        on = machine.unlimited() if machine.is_virtual else machine
        return lambda block: self._run(Plan(Knobs()), on, block)

    def _run(self, plan: Plan, machine: Machine, block: contextlib.AbstractContextManager[Any]) -> Execution:
        """Run the cell inside a block."""
        code = compile(with_values(self.code, plan.variables), self.filename, "exec", dont_inherit=True)
        real = machine.recorded_device
        device = real or torch.device("cuda")
        names: dict[str, Any] = {}
        has_names, result = False, Ran()
        with self._names.restored(machine), machine.block() as gpu, contextlib.ExitStack() as stack:
            with (
                record(real, Unrelated.DROPPED) as recording,
                self._names.limited(recording),
                measuring(gpu) as meter,
            ):
                with ending_out_of_memory(recording):
                    names = self._names.begin()
                    if real is None:
                        self._names.put_on_virtual_gpu(names)
                    has_names = True
                if has_names:
                    result = ran(lambda: exec(code, names), plan, names, block, stack, device, recording)
            names.clear()
        tape = recording.tape
        if not has_names:
            tape = tape.replace(meta=tape.meta._replace(notes=(*tape.meta.notes, *self._names.notes_without_room())))
        return Execution(plan.knobs, tape, result.applied, meter.total(), samples=result.samples)

    def bytes_on(self, device: torch.device) -> int:
        """Return the bytes of the names' models, gradients, optimizer states and tensors on a real GPU."""
        return self._names.bytes_on(device)
