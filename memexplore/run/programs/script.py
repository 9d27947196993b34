"""A script or a module with its command line as a program: it can be run again with other knobs."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import pathlib
import sys
import sysconfig
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import cloudpickle
import torch

from memexplore.recorder.recording import Recording, record
from memexplore.run.knobs.applying.model_state import preserve_random_states
from memexplore.run.knobs.applying.report import ApplyReport, counted
from memexplore.run.knobs.knobs import Knobs
from memexplore.run.machine import DEFAULT_VIRTUAL, Machine, machine_of
from memexplore.run.programs import interpreter, real_run
from memexplore.run.programs.acting import Acting, CannotActError, Plan, acting
from memexplore.run.programs.cost import measuring
from memexplore.run.programs.execution import Execution
from memexplore.run.programs.limit import SECONDS, FailureLimit
from memexplore.run.programs.loop import Loop, Ran, ran
from memexplore.tape import Tape
from memexplore.virtual_gpu.files import session

Block = Callable[[Recording], contextlib.AbstractContextManager[object]]
"""Makes the block in which a recorded script runs."""


class Recorded(NamedTuple):
    """A script that was run as its user starts it."""

    tape: Tape
    error: BaseException | None
    """The exception that ended it."""


@dataclasses.dataclass(frozen=True, eq=False)
class Script:
    """A file, or by its name a module as with `python -m`, with the arguments of its command line.

    Called, it runs like Python runs it; `record` records that. `execute` also restores what it has changed: `sys.argv`,
    `sys.path`, the environment, the working directory, random states, and its own modules, which another run imports
    again. Files are kept apart on a virtual GPU in both.

    Raises SyntaxError for a file that is not Python, OSError for a file that cannot be read.
    """

    target: pathlib.Path | str
    arguments: tuple[str, ...] = ()
    limit: FailureLimit | None = dataclasses.field(default=None, repr=False)
    """Limits runs that nobody watches, on a virtual GPU."""
    loop: Loop = dataclasses.field(init=False, repr=False)
    """What runs as written have shown of the training loop."""
    _start: Callable[[], None] = dataclasses.field(init=False, repr=False)

    def __post_init__(self) -> None:
        if isinstance(self.target, str):
            start = interpreter.module(self.target, list(self.arguments))
        else:
            start = interpreter.script(self.target, list(self.arguments))
        object.__setattr__(self, "_start", start)
        object.__setattr__(self, "loop", Loop("this script", lambda seen: dict(seen.arguments)))

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.target, self.arguments, self.limit)

    def packed(self, most_seconds: float = SECONDS) -> bytes:
        """Return the script as bytes for another process, where each run is limited to some seconds."""
        target = self.target if isinstance(self.target, str) else self.target.absolute()
        return cloudpickle.dumps(Script(target, self.arguments, FailureLimit(most_seconds)))

    @property
    def may_be_endless(self) -> bool:
        """Whether the script may go on for ever where it has the memory."""
        return self.limit is None

    @property
    def code(self) -> str:
        """The source of a file, "" for a module."""
        return "" if isinstance(self.target, str) else self.target.read_text(encoding="utf-8")

    def assigned(self) -> dict[str, Any]:
        """Return no variables: those of a script are its own."""
        return {}

    def __call__(self) -> None:
        """Run the program. `sys.exit` in it raises SystemExit; a module that cannot be run raises `NoModuleError`."""
        self._start()

    def plan(self, knobs: Knobs, machine: Machine) -> Plan:
        """Return how knobs act on the script; what is not known yet, a run until its second update shows.

        Raises ValueError for knobs that cannot act, and what the script raises.
        """
        if "variables" in knobs.changed():
            raise CannotActError("variables cannot be changed: those of a script are its own; give it an argument")
        return self.loop.plan(knobs, self._observe(machine), is_virtual=machine.is_virtual)

    def unavailable_knobs(self) -> dict[str, str]:
        """Return the fields of `Knobs` that do not apply to the script, each with the reason."""
        reasons = self.loop.unavailable(self._observe(machine_of(DEFAULT_VIRTUAL)))
        return reasons | {"variables": "those of a script are its own; give it an argument"}

    def execute(self, knobs: Knobs, machine: Machine) -> Execution:
        """Execute the script with some knobs, and drop what it prints.

        Raises what the script raises, except running out of memory; RuntimeError where it ends with an exit status;
        ValueError for a knob that cannot act.
        """
        plan = self.plan(knobs, machine)
        return self._run(plan, machine, self.loop.watching() if knobs == Knobs() else contextlib.nullcontext())

    def record(self, knobs: Knobs, machine: Machine, block: Block) -> Recorded:
        """Run the script inside a block as its user starts it, and record it: it prints, and nothing is restored.

        The block is entered while the GPU is on and the script's files are there; it sees the exception that ends the
        script, before its frames are gone, and may keep it from the result.

        Raises ValueError for a knob that cannot act, and what `plan` raises.
        """
        plan = self.plan(knobs, machine) if knobs.changed() else Plan(knobs)
        ended_by = None
        with (
            session.every_file(),
            machine.block(),
            acting(plan, {}) if knobs.changed() else contextlib.nullcontext() as changes,
            record(machine.recorded_device) as recording,
        ):
            # Above are the frames of who calls this.
            recording.end_stacks_at(sys._getframe())
            try:
                with block(recording), _running(changes, machine.recorded_device):
                    self._start()
            except CannotActError:
                raise
            except BaseException as error:
                recording.ended_by(error)
                ended_by = error
            notes = () if changes is None else tuple(_notes(knobs, changes.report(is_complete=ended_by is None)))
        tape = recording.tape
        return Recorded(tape.replace(meta=tape.meta._replace(notes=(*tape.meta.notes, *notes))), ended_by)

    def _observe(self, machine: Machine) -> Callable[[contextlib.AbstractContextManager[Any]], object]:
        # Also for a real GPU: the run that the user wants is the only one on it.
        return lambda block: self._run(Plan(Knobs()), machine.unlimited(), block)

    def _run(self, plan: Plan, machine: Machine, block: contextlib.AbstractContextManager[Any]) -> Execution:
        """Run the script inside a block."""
        real = machine.recorded_device
        device = real or torch.device("cuda")
        result = Ran()
        with (
            contextlib.nullcontext() if real is None else real_run.preserve_device(real),
            _restored(),
            session.every_file(),
            machine.block() as gpu,
            contextlib.ExitStack() as stack,
            record(real) as recording,
            contextlib.nullcontext() if self.limit is None else self.limit.limited(recording),
            measuring(gpu) as meter,
        ):
            result = ran(self._to_its_end, plan, {}, block, stack, device, recording)
        return Execution(plan.knobs, recording.tape, result.applied, meter.total(), samples=result.samples)

    def _to_its_end(self) -> None:
        try:
            self._start()
        except SystemExit as error:
            if error.code:
                raise RuntimeError(f"the script ended with exit status {error.code}") from error


def _running(changes: Acting | None, device: torch.device | None) -> contextlib.AbstractContextManager[None]:
    """Return the block in which knobs act on a program; `device` is a real one, None for a virtual GPU."""
    return contextlib.nullcontext() if changes is None else changes.running(device or torch.device("cuda"))


def _notes(knobs: Knobs, report: ApplyReport) -> Iterator[str]:
    """Yield what was changed, and what a reader of the result has to know of it, once each."""
    yield f"Knobs: {knobs}."
    yield from dict.fromkeys(report.notes)
    if report.skipped:
        site, reason = report.skipped[0]
        yield f"Left as written: {counted(len(report.skipped), 'site')}, such as {site!r}: {reason}."


@contextlib.contextmanager
def _restored() -> Iterator[None]:
    """Restore the environment, the working directory, random states and the user's modules after the block."""
    modules, folder, environment = set(sys.modules), os.getcwd(), dict(os.environ)
    with preserve_random_states(), torch.random.fork_rng([]):
        try:
            yield
        finally:
            os.chdir(folder)
            os.environ.clear()
            os.environ.update(environment)
            for name in set(sys.modules) - modules:
                if not (getattr(sys.modules[name], "__file__", None) or _INSTALLED[0]).startswith(_INSTALLED):
                    del sys.modules[name]


_INSTALLED = tuple(sysconfig.get_paths()[name] for name in ("stdlib", "platstdlib", "purelib", "platlib"))
"""Folders of modules that are not the user's; C libraries cannot be imported twice."""
