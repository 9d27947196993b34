"""Run a program with knobs on a machine. Whoever wants to know what a setting does calls `run`.

`run` owns the second run with unlimited memory of what does not fit, and the reuse of earlier traces.
"""

from __future__ import annotations

import contextlib
import dataclasses
import enum
import warnings
from typing import Protocol

from memexplore.allocator import Settings
from memexplore.analysis.curves import peak
from memexplore.analysis.need import goes_through
from memexplore.analysis.picture import with_whole
from memexplore.run.dropped_prints import without_prints
from memexplore.run.knobs.applying.on_machine import on_machine
from memexplore.run.knobs.applying.report import ApplyReport
from memexplore.run.knobs.knobs import Knobs
from memexplore.run.machine import Machine, machine_of
from memexplore.run.programs import expected as extrapolation
from memexplore.run.programs import step_run
from memexplore.run.programs.cost import Cost, interruptible
from memexplore.run.programs.execution import Execution
from memexplore.run.programs.out_of_memory import fits
from memexplore.run.programs.outcome import Outcome, outcome_of
from memexplore.run.programs.step import Step
from memexplore.tape import Tape

_OPS, _OPS_A_ROW = 20_000, 4
"""Ops of the run with unlimited memory of a program that may have no end: a number, and more for each row so far."""


class Program(Protocol):
    """What can be run: a `Step`, a `Cell`, a `Script` or a `Function`."""

    def execute(self, knobs: Knobs, machine: Machine) -> Execution:
        """Execute the program once; `machine` has the GPU and the settings of the knobs already.

        Whatever the program changes is restored. Raises what the program raises, except running out of memory.
        """

    def unavailable_knobs(self) -> dict[str, str]:
        """Return the fields of `Knobs` that the program cannot have, each with the reason."""

    @property
    def may_be_endless(self) -> bool:
        """Whether the program may go on for ever where it has the memory."""


class Want(enum.Enum):
    """What is wanted of a run."""

    TAPE = "the tape up to the failure, and the tape with unlimited memory"
    NUMBERS = "the numbers, and only the tape with unlimited memory: half the time where the program does not fit"


@dataclasses.dataclass(frozen=True, eq=False)
class Run:
    """A program that was run with knobs on a machine.

    >>> import torch
    >>> step = Step(torch.nn.Linear(1024, 1024), torch.zeros(4, 1024), loss=torch.mean)
    >>> result = run(step, machine=machine_of("8MiB"))
    >>> result.fits, result.outcome.margin < 0, peak(result.tape.whole)[0] > 8 << 20
    (False, True, True)
    """

    execution: Execution
    outcome: Outcome
    """The numbers of the whole run, also where it does not fit."""
    is_expected: bool = False
    """Whether it was not run, but expected from runs of other batches."""

    @property
    def knobs(self) -> Knobs:
        """The knobs."""
        return self.execution.knobs

    @property
    def tape(self) -> Tape:
        """The tape up to the failure; its `whole` is the run with unlimited memory where the program does not fit."""
        return self.execution.tape

    @property
    def applied(self) -> ApplyReport:
        """What the knobs changed."""
        return self.execution.applied

    @property
    def cost(self) -> Cost:
        """The cost of the first step."""
        return self.execution.cost

    @property
    def seconds(self) -> float:
        """Seconds of one step, measured on a real device, else not a number."""
        return self.execution.seconds

    @property
    def fits(self) -> bool:
        """Whether the program fits the machine."""
        return self.outcome.fits

    def with_knobs(self, knobs: Knobs) -> Run:
        """Return the same run under other knobs, for a search whose settings leave out what all of them share."""
        return dataclasses.replace(
            self, execution=self.execution._replace(knobs=knobs), outcome=self.outcome._replace(knobs=knobs)
        )


def run(program: Program, knobs: Knobs | None = None, machine: Machine | None = None, want: Want = Want.TAPE) -> Run:
    """Run a program with knobs on a machine, and a second time with unlimited memory if it does not fit.

    Default: the program as written, on the real GPU if usable, else on a virtual T4. A GPU that the knobs name comes
    first; it is virtual, and so is a GPU under other allocator settings. The second run is always virtual.

    >>> import torch
    >>> step = Step(torch.nn.Linear(1024, 1024), torch.zeros(4, 1024), loss=torch.mean)
    >>> numbers = run(step, machine=machine_of("8MiB"), want=Want.NUMBERS)
    >>> fits(numbers.tape), numbers.outcome == run(step, machine=machine_of("8MiB")).outcome
    (True, True)

    Raises what the program raises, except running out of memory on a GPU; ValueError for knobs that do not suit the
    program or the machine; MemoryError for a setting that needs more memory than this machine's CPU has.
    """
    knobs = knobs or Knobs()
    on = on_machine(knobs, machine or machine_of())
    if want is Want.NUMBERS and isinstance(program, Step) and on.is_virtual:
        return _numbers(program, knobs, on)
    return completed(program, program.execute(knobs, on), on)


def completed(program: Program, execution: Execution, machine: Machine) -> Run:
    """Return the run of an execution; what does not fit is executed again with unlimited memory."""
    unlimited = None if fits(execution.tape) else _run_unlimited(program, execution, machine)
    return _run_of(execution, unlimited, machine)


def _run_of(execution: Execution, unlimited: Execution | None, machine: Machine) -> Run:
    is_fitting, capacity = fits(execution.tape), execution.tape.meta.capacity
    if unlimited is not None:
        execution = execution._replace(tape=with_whole(execution.tape, unlimited.tape))
    capacity = machine.gpu.capacity if capacity is None else capacity
    return Run(execution, outcome_of(unlimited or execution, machine.gpu, capacity, is_fitting))


class _TooLong(BaseException):
    """Ends a run for its length. A BaseException, so that `except Exception` cannot catch it."""


def _run_unlimited(program: Program, execution: Execution, machine: Machine) -> Execution | None:
    """Execute a program that ran out of memory with unlimited memory; None where that raises or has no end."""
    if not program.may_be_endless:
        return program.execute(execution.knobs, machine.unlimited())
    left = _OPS + _OPS_A_ROW * len(execution.tape)

    def count() -> None:
        nonlocal left
        left -= 1
        if left < 0:
            raise _TooLong

    with (
        contextlib.suppress(Exception, _TooLong),
        interruptible(count),
        without_prints(),
        warnings.catch_warnings(action="ignore"),
    ):
        return program.execute(execution.knobs, machine.unlimited())
    return None


def _numbers(step: Step, knobs: Knobs, machine: Machine) -> Run:
    """Run a step with unlimited memory, and replay its requests on an allocator with the capacity of the GPU.

    Where a step reads how much memory the GPU has, it is run there too.
    """
    unlimited = step.execute(knobs, machine.unlimited())
    if not step_run.is_traced(step, knobs, machine):
        return _run_of(step.execute(knobs, machine), unlimited, machine)
    capacity = machine.capacity
    is_fitting = _goes_through(unlimited.tape, capacity)
    if is_fitting is None:
        is_fitting = step_run.derived(step, knobs, machine) is not None
    return Run(unlimited, outcome_of(unlimited, machine.gpu, capacity, is_fitting))


def _goes_through(tape: Tape, capacity: int) -> bool | None:
    """Return whether a run with unlimited memory fits a capacity; None where only an allocator with it can tell."""
    settings = Settings.parse(tape.meta.settings)
    if settings.per_process_memory_fraction < 1 or settings.throw_on_cudamalloc_oom:
        return None  # these compare with all of the memory of the GPU
    if peak(tape, "reserved")[0] <= capacity:
        return True  # no segment is refused, so all blocks are placed alike
    return goes_through(tape, capacity)


def expected(step: Step, knobs: Knobs, machine: Machine) -> Run | None:
    """Return what `run` will probably return for a step, in a fraction of its time; None where nothing is expected.

    For another batch the sizes are extrapolated from runs of two others. For a setting that does not fit, the tape
    ends at the failed request, without what Python frees after it.

    >>> import torch
    >>> step = Step(torch.nn.Linear(64, 64), torch.zeros(8, 64), loss=torch.mean, optimizer=torch.optim.SGD)
    >>> machine = machine_of("T4")
    >>> for batch in (10, 12):
    ...     result = run(step, Knobs(batch=batch), machine)
    >>> picture = expected(step, Knobs(batch=20), machine)
    >>> picture.is_expected, peak(picture.tape) == peak(run(step, Knobs(batch=20), machine).tape)
    (True, True)
    """
    on = on_machine(knobs, machine)
    if not on.is_virtual:
        return None
    tape, applied = extrapolation.expected_tape(step, knobs, on), ApplyReport()
    if tape is None and step_run.trace_on_unlimited(step, knobs, on):
        failing = step_run.failing(step, knobs, on)
        unlimited = step_run.derived(step, knobs, on.unlimited())
        if failing is not None and unlimited is not None:
            tape, applied = with_whole(failing.tape, unlimited.tape), failing.applied
    if tape is None:
        return None
    execution = step_run.execution_of(step, knobs, tape, applied, Cost())
    shown = execution if tape.whole is None else execution._replace(tape=tape.whole)
    return Run(execution, outcome_of(shown, on.gpu, on.capacity, fits(tape)), is_expected=True)
