"""Watch a whole program as one run, for `memexplore run --live`.

The models and optimizers of the program are not known, so every model that is called is watched. Where the program
watches a run itself, with `watch` or a callback, that one takes over.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator

import torch

from memexplore.live import watch as watching
from memexplore.live.counters import Counters, CudaCounters, VirtualCounters
from memexplore.live.live import Live, State
from memexplore.ranks.rows import StepRow


class Program:
    """The run of a program that is shown."""

    def __init__(self) -> None:
        self.live: Live
        """The run of the whole program, or the last one that the program began itself."""
        self.out_of_memory = 0
        """Requests of the program that failed."""
        self.gave_up = False
        """Whether the last of them failed after the last step, so that no step followed."""
        self._own: watching.Session | None = None
        self._counters: Counters | None = None
        self._failed_before = self._failed_at_step = 0

    def begins(self, session: watching.Session) -> None:
        """Note that a run begins; the run of the whole program ends for another one."""
        own = self._own
        if own is None:
            self._own, self._counters = session, session.watcher.counters
            self._failed_before = self._failed_at_step = failed_requests(self._counters)
        elif own.state in (State.WATCHING, State.PAUSED):
            own.stop(None)
            own.hand_over(session)
            own.clean()
        session.watcher.store.on_row.append(self._add)
        self.live = session.live

    def _add(self, row: StepRow) -> None:
        if self._counters is not None and not row.error:
            self._failed_at_step = failed_requests(self._counters)

    def ends(self) -> None:
        """Count the requests that failed. Call it while the virtual GPU is on."""
        if self._counters is not None:
            failed = failed_requests(self._counters)
            self.out_of_memory, self.gave_up = failed - self._failed_before, failed > self._failed_at_step


def failed_requests(counters: Counters) -> int:
    """Return the number of requests to the allocator of a device that failed, 0 where nothing is counted."""
    if isinstance(counters, VirtualCounters):
        return counters.failed_requests
    if isinstance(counters, CudaCounters):
        return int(torch.cuda.memory_stats(counters.device).get("num_ooms", 0))
    return 0


@contextlib.contextmanager
def watch_program(
    shown: Callable[[Live], None], device: str | torch.device | None, folder: str | os.PathLike[str] | None
) -> Iterator[Program]:
    """Watch all steps of the block. `shown` is called with each run that is watched from then on."""
    program = Program()

    def begins(session: watching.Session) -> None:
        program.begins(session)
        shown(session.live)

    watching.on_start.append(begins)
    try:
        with watching.watch(device=device, folder=folder):
            try:
                yield program
            finally:
                program.ends()
    finally:
        watching.on_start.remove(begins)
