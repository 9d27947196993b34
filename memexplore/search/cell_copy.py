"""A notebook cell with a copy of its names, which another process can run on the virtual GPU.

In: the source of a cell and its names, as bytes. Out: a `Trial` for some `Knobs`; each run begins with a new copy.
"""

from __future__ import annotations

import ast
import contextlib
import dataclasses
import pickle
import signal
import threading
import time
from collections.abc import Iterator
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook

from memexplore import capture
from memexplore.knobs.knobs import Knobs
from memexplore.knobs.report import ApplyReport
from memexplore.steps.cell import Cell, CellEnded, executed, with_values
from memexplore.steps.cost import interruptible, measuring
from memexplore.steps.out_of_memory import ending_out_of_memory, fits
from memexplore.steps.trial import Trial, target_of
from memexplore.tape import Os

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
    >>> curves.peak(cell.run(Knobs(), "T4").tape)[0]  # in blocks of 512 bytes
    4096
    """

    code: str
    filename: str
    packed: bytes
    _updates: int | None = None
    """Updates of the run that failed, None before it."""

    def assigned(self) -> dict[str, Any]:
        """Return the variables that the cell assigns, as `Cell.assigned` does."""
        return Cell(self.code, {}).assigned()

    def run(self, knobs: Knobs, gpu: Any, release: str | None = None, os: str = Os.LINUX) -> Trial:
        """Run the cell with some knobs on a virtual GPU, at most some updates longer than the run that failed.

        Raises what the cell raises, except running out of memory, and TimeoutError for a run that takes too long.
        """
        tree: ast.Module = with_values(self.code, dict(knobs.variables))
        program = compile(tree, self.filename, "exec", dont_inherit=True)
        limit = _Limit(self._updates)
        with (
            capture.virtual(target_of(knobs, gpu), release=release, settings=knobs.settings or "", os=os) as device,
            contextlib.ExitStack() as stack,
            limit.counting(),
            interruptible(limit.check),
            capture.record() as recording,
            measuring(device.mode) as meter,
        ):
            names: dict[str, Any] | None = None
            applied = ApplyReport()
            with contextlib.suppress(CellEnded), limit.ending_loops():
                with ending_out_of_memory(recording):
                    names = pickle.loads(self.packed)
                if names is not None:
                    applied = executed(program, names, knobs, stack, torch.device("cuda"), recording)
            if names is not None:
                names.clear()
        if limit.is_late:
            raise TimeoutError(f"the cell has run for {_SECONDS:.0f} s without an end")
        if self._updates is None and not fits(recording.tape):
            self._updates = limit.updates
        return Trial(knobs, recording.tape, applied, meter.total())


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
            raise CellEnded
        if time.monotonic() > self._end:
            self.is_late = True
            raise CellEnded
