"""Run a function on a virtual GPU: `simulate`."""

from __future__ import annotations

import contextlib
import dataclasses
import warnings
from collections.abc import Callable
from typing import Any, ClassVar

import torch

from memexplore.analysis import verdict, verdict_content
from memexplore.hardware.catalogue import Gpu
from memexplore.recorder.recording import record
from memexplore.run.knobs.applying.report import ApplyReport
from memexplore.run.knobs.knobs import KNOBS, Knobs
from memexplore.run.machine import DEFAULT_VIRTUAL, Machine, machine_of
from memexplore.run.programs.cost import Cost, is_interruptible, measuring
from memexplore.run.programs.execution import Execution
from memexplore.run.run import run
from memexplore.tape import Os, Tape
from memexplore.virtual_gpu.values.notes import notes_of_run
from memexplore.virtual_gpu.values.setting import Values


@dataclasses.dataclass(frozen=True)
class Function:
    """A function without arguments as a program."""

    function: Callable[[], Any]
    may_be_endless: ClassVar[bool] = True

    def execute(self, knobs: Knobs, machine: Machine) -> Execution:
        """Call the function on the virtual GPU of a machine. An exception gets a note for each assumed value."""
        with machine.turned_on() as device:
            metering = measuring(device) if is_interruptible() else contextlib.nullcontext()
            recording = record()
            try:
                with contextlib.suppress(torch.OutOfMemoryError), metering, recording as running:
                    self.function()
            except Exception as error:
                for note in notes_of_run():
                    error.add_note(f"On the virtual {machine.gpu.key}, {note}")
                raise
        return Execution(knobs, running.tape, ApplyReport(), Cost())

    def unavailable_knobs(self) -> dict[str, str]:
        """Return the fields of `Knobs` that a function cannot have: all."""
        text = "a function has no knobs: make a Step of its model and batch"
        return dict.fromkeys(KNOBS, text)


def simulate(
    function: Callable[[], Any],
    *,
    gpu: str | Gpu = DEFAULT_VIRTUAL,
    release: str | None = None,
    settings: str = "",
    os: str = Os.LINUX,
    values: str | Values = Values.KNOWN,
    world: int | None = None,
    rank: int = 0,
) -> Tape:
    """Run a function without arguments on a virtual GPU and return its Tape.

    An out-of-memory error ends the run and is a row of the tape; every other exception is raised, with a note for each
    value that was assumed. A function that comes to its end without the GPU, or with child processes that were not
    measured, gives a warning. For the arguments see `virtual`. The value that the function returns is dropped.

    A function that runs out of memory is called a second time, with unlimited memory and without its prints: `whole` of
    the tape is that run. It is None where the second call raises an error or goes on for far longer, as a loop without
    an end does.

    >>> import torch
    >>> from memexplore.tape import Action
    >>> tape = simulate(lambda: torch.nn.Linear(1000, 1000).cuda(), gpu="T4")
    >>> int(tape.size[tape.action == Action.ALLOC].sum()) == (1000 * 1000 + 1000) * 4
    True
    """
    if not callable(function):
        raise TypeError(
            f"simulate expects a function without arguments, not {type(function).__name__}; "
            "for the tape of a Step write mx.sweep(step, [mx.Knobs()])[mx.Knobs()]"
        )
    machine = machine_of(gpu, release=release, settings=settings, os=os, values=values, world=world, rank=rank)
    if not machine.is_virtual:
        raise ValueError(f"simulate runs on a virtual GPU: name one such as T4, not {gpu!r}")
    return simulate_on(function, machine, stacklevel=3)


def simulate_on(function: Callable[[], Any], machine: Machine, stacklevel: int = 2) -> Tape:
    """Run a function without arguments on a virtual machine and return its Tape, as `simulate` does."""
    tape = run(Function(function), machine=machine).tape
    if verdict.verdict(tape) in (verdict.Verdict.NOT_ON_GPU, verdict.Verdict.PARTLY_MEASURED):
        warnings.warn(verdict_content.verdict_content(tape).headline, stacklevel=stacklevel)
    return tape
