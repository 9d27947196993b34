"""A notebook cell with a copy of its names, which another process can run on the virtual GPU, each time anew."""

from __future__ import annotations

import contextlib
import dataclasses
import pickle
import signal
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any, ClassVar

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook

from memexplore.recorder.recording import record
from memexplore.run.code.variables import assigned, with_values
from memexplore.run.knobs.knobs import Knobs
from memexplore.run.machine import DEFAULT_VIRTUAL, Machine, machine_of
from memexplore.run.programs.acting import Plan
from memexplore.run.programs.cost import ProgramEnded, interruptible, measuring
from memexplore.run.programs.execution import Execution
from memexplore.run.programs.loop import Loop, Ran, ran
from memexplore.run.programs.out_of_memory import ending_out_of_memory, fits
from memexplore.run.programs.seen import Batch

_MORE_UPDATES = 4
"""Updates, of all optimizers, that a run goes on after those of the run that failed."""
_SECONDS = 60.0
"""Most seconds of one run."""


@dataclasses.dataclass(eq=False)
class CellCopy:
    """The source of a cell and a packed copy of its names.

    `packed` is unpickled while the virtual GPU is on, and gives the names.

    >>> cell = CellCopy("import torch; x = torch.zeros(size, device='cuda')", "<cell>", pickle.dumps({"size": 1000}))
    >>> from memexplore.analysis import curves
    >>> from memexplore.run.machine import machine_of
    >>> curves.peak(cell.execute(Knobs(), machine_of("T4")).tape)[0]  # in blocks of 512 bytes
    4096
    """

    code: str
    filename: str
    packed: bytes
    may_be_endless: ClassVar[bool] = False  # it ends itself
    _updates: int | None = None
    """Updates of the run that failed, None before it."""
    _loop: Loop = dataclasses.field(init=False, repr=False)

    def __post_init__(self) -> None:
        self._loop = Loop("this cell", lambda seen: self.assigned())

    def assigned(self) -> dict[str, Any]:
        """Return the variables that the cell assigns, as `Cell.assigned` does."""
        return assigned(self.code)

    @property
    def batch(self) -> Batch | None:
        """Where the batch can be changed, as far as a run as written has shown."""
        return self._loop.batch

    def execute(self, knobs: Knobs, machine: Machine) -> Execution:
        """Execute the cell with some knobs on a virtual GPU, at most some updates longer than the run that failed.

        Raises what the cell raises, except running out of memory, ValueError for knobs that cannot act, and
        TimeoutError for a run that takes too long.
        """
        plan = self._loop.plan(knobs, self._observe(machine), is_virtual=True)
        block = self._loop.watching() if knobs == Knobs() else contextlib.nullcontext()
        limit = _Limit(self._updates)
        execution = self._run(plan, machine, block, limit)
        if self._updates is None and not fits(execution.tape):
            self._updates = limit.updates
        return execution

    def _observe(self, machine: Machine) -> Callable[[contextlib.AbstractContextManager[Any]], object]:
        return lambda block: self._run(Plan(Knobs()), machine.unlimited(), block, _Limit(None))

    def _run(
        self, plan: Plan, machine: Machine, block: contextlib.AbstractContextManager[Any], limit: _Limit
    ) -> Execution:
        """Run the cell inside a block, until a limit ends it."""
        code = compile(with_values(self.code, plan.variables), self.filename, "exec", dont_inherit=True)
        with (
            machine.turned_on() as device,
            contextlib.ExitStack() as stack,
            limit.counting(),
            interruptible(limit.check),
            record() as recording,
            measuring(device.runner) as meter,
        ):
            names: dict[str, Any] = {}
            result = Ran()
            with contextlib.suppress(ProgramEnded), limit.ending_loops():
                is_copied = False
                with ending_out_of_memory(recording):
                    # Not copied: functions of the notebook have this dictionary as their globals.
                    names = pickle.loads(self.packed)
                    is_copied = True
                if is_copied:
                    result = ran(lambda: exec(code, names), plan, names, block, stack, torch.device("cuda"), recording)
            names.clear()
        if limit.is_late:
            raise TimeoutError(f"the cell has run for {_SECONDS:.0f} s without an end")
        return Execution(plan.knobs, recording.tape, result.applied, meter.total(), samples=result.samples)

    def samples_of(self, knobs: Knobs) -> int:
        """Return 1: where a run has trained, its `Execution` says how many samples."""
        return 1

    def unavailable_knobs(self) -> dict[str, str]:
        """Return the fields of `Knobs` that do not apply to the cell, each with the reason."""
        return self._loop.unavailable(self._observe(machine_of(DEFAULT_VIRTUAL)))


class _Limit:
    """Ends a run after some updates, or when it takes too long."""

    def __init__(self, failed_after: int | None) -> None:
        self.updates = 0
        self.is_late = False
        self._most = None if failed_after is None else failed_after + _MORE_UPDATES
        self._end: float | None = None
        """When the run is late; None before and after it."""

    @contextlib.contextmanager
    def counting(self) -> Iterator[None]:
        """Count the updates of all optimizers in the block."""

        def count(*_: Any) -> None:
            self.updates += 1

        handle = register_optimizer_step_post_hook(count)
        try:
            yield
        finally:
            handle.remove()

    @contextlib.contextmanager
    def ending_loops(self) -> Iterator[None]:
        """End the block when it takes too long, also where no op runs on the GPU; in the main thread of Linux."""
        self._end = time.monotonic() + _SECONDS
        try:
            with self._alarm():
                yield
        finally:
            self._end = None

    @contextlib.contextmanager
    def _alarm(self) -> Iterator[None]:
        if not hasattr(signal, "setitimer") or threading.current_thread() is not threading.main_thread():
            yield
            return
        before = signal.signal(signal.SIGALRM, lambda *_: self.check())
        # Again every second: an exception in a finalizer is lost.
        signal.setitimer(signal.ITIMER_REAL, _SECONDS + 1, 1)
        try:
            try:
                yield
            finally:
                signal.setitimer(signal.ITIMER_REAL, 0)
        finally:
            # The alarm may come before that call, and interrupt it.
            signal.setitimer(signal.ITIMER_REAL, 0)
            signal.signal(signal.SIGALRM, before)

    def check(self) -> None:
        """End the cell when it has run for long enough; called before every op."""
        if self._end is None:
            return
        if self._most is not None and self.updates >= self._most:
            raise ProgramEnded
        if time.monotonic() > self._end:
            self.is_late = True
            raise ProgramEnded
