"""Find the smallest capacity with which the requests of a tape go through, by replays.

A run with room reserves more than it needs: before a request fails, the allocator gives its cache back and tries again.
"""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from memexplore.allocator.replay import Trial, trial
from memexplore.tape import Action, Tape
from memexplore.tape.allocator_settings import BLOCK, SMALL_SEGMENT, Settings

_ROWS = 4_000_000
"""Rows that a search replays in all: of a tape with many rows fewer capacities are tried."""
_LARGER = 3
"""Capacities that are tried between the smallest one and the one without pressure."""


class Need(NamedTuple):
    """The memory that a run needs, in bytes."""

    smallest: int
    """The smallest capacity with which it goes through; all larger ones that were tried suffice too.

    A multiple of 2 MiB. For a tape of more than about 300,000 rows it suffices, but may not be the smallest."""
    without_pressure: int
    """The peak reserved where there is room for everything."""
    retries: int
    """How often the allocator releases its cache with the smallest capacity, each time waiting for the GPU."""


def smallest_capacity(tape: Tape, settings: Settings | None = None, optional: NDArray[np.bool_] | None = None) -> Need:
    """Return the memory with which the requests of a tape go through, by default under its own allocator settings.

    Requests whose failure the tape records are left out, and so is a limit on the process. Rows that are `optional`
    are requests without which the program goes on.

    >>> from memexplore.tape import Meta, Source
    >>> rows = {"action": [Action.ALLOC, Action.FREE_REQUESTED, Action.FREE_COMPLETED, Action.ALLOC],
    ...         "address": [1, 1, 1, 2], "size": [12 << 20, 12 << 20, 12 << 20, 20 << 20]}
    >>> need = smallest_capacity(Tape.from_columns(rows, meta=Meta(Source.PREDICTED, "cuda:0")))
    >>> need.smallest >> 20, need.without_pressure >> 20, need.retries
    (20, 32, 1)

    Raises ValueError if a row frees an address without a block.
    """
    own = Settings.parse(tape.meta.settings) if settings is None else settings
    unlimited = dataclasses.replace(own, per_process_memory_fraction=1.0, throw_on_cudamalloc_oom=False)
    return _Search(tape, unlimited, np.zeros(len(tape), bool) if optional is None else optional).need()


class _Search:
    """Capacities that were tried, as numbers of pages of 2 MiB."""

    def __init__(self, tape: Tape, settings: Settings, optional: NDArray[np.bool_]) -> None:
        self.tape, self.settings, self.optional = tape, settings, optional
        self.rows = _ROWS
        """Rows that may still be replayed."""
        self.trials: dict[int, Trial] = {}

    def need(self) -> Need:
        with_room = trial(self.tape, self.settings, None)
        enough = -(-with_room.reserved // SMALL_SEGMENT)
        self.trials[enough] = with_room
        smallest = self._between(-(-_live(self.tape, self.optional) // SMALL_SEGMENT), enough)
        # More memory need not suffice where less does: other cached blocks are reused and split.
        while (failing := self._failing_between(smallest, enough)) is not None:
            smallest = self._between(failing + 1, enough)
        return Need(smallest * SMALL_SEGMENT, with_room.reserved, self.trials[smallest].retries)

    def _between(self, low: int, high: int) -> int:
        """Return a capacity that suffices, where `high` does; with one page less it does not, if rows are left."""
        while low < high and self.rows > 0:
            middle = (low + high) // 2
            if self._suffices(middle):
                high = middle
            else:
                low = middle + 1
        return high

    def _failing_between(self, smallest: int, enough: int) -> int | None:
        """Return the largest capacity that fails among some between two that suffice; None if none fails."""
        larger = range(smallest, enough, max((enough - smallest) // (_LARGER + 1), 1))[1:]
        return next((pages for pages in reversed(larger) if self.rows > 0 and not self._suffices(pages)), None)

    def _suffices(self, pages: int) -> bool:
        if pages not in self.trials:
            self.trials[pages] = trial(self.tape, self.settings, pages * SMALL_SEGMENT, self.optional)
            self.rows -= self.trials[pages].rows
        return self.trials[pages].rows == len(self.tape)


def _live(tape: Tape, optional: NDArray[np.bool_]) -> int:
    """Return the most bytes of blocks at once; with less no placement of the blocks is possible."""
    if optional.any():
        return 0  # which of them fail depends on the capacity
    sizes = -(-tape.size // BLOCK) * BLOCK
    born = np.isin(tape.action, (Action.ALLOC, Action.PREEXISTING))
    changes = np.where(born, sizes, 0) - np.where(tape.action == Action.FREE_COMPLETED, sizes, 0)
    return int(np.cumsum(changes).max(initial=0))
