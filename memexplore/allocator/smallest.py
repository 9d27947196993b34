"""Find the smallest capacity with which the requests of a tape go through, by replays.

A run with room reserves more than it needs: before a request fails, the allocator gives its cache back and tries again.
"""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from memexplore.allocator.actions import GROWTH
from memexplore.allocator.replay import Trial, trial
from memexplore.tape import Action, Tape
from memexplore.tape.allocator_settings import BLOCK, SMALL_SEGMENT, Settings

_ROWS = 4_000_000
"""Rows that a search replays in all: of a tape with many rows fewer capacities are tried."""


class Need(NamedTuple):
    """The memory that a run needs, in bytes."""

    smallest: int
    """The smallest capacity with which it goes through; so it does with all larger ones that were tried.

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
        reserved = _reserved(self.tape, self.settings)
        enough = -(-reserved // SMALL_SEGMENT)
        # More memory need not suffice where less does: other cached blocks are reused and split. So where a page less
        # than without pressure fails, nothing below is tried.
        smallest = enough
        if enough and self._suffices(enough - 1):
            smallest = self._between(-(-_live(self.tape, self.optional) // SMALL_SEGMENT), enough - 1)
            while not self._suffices(middle := (smallest + enough) // 2):
                smallest = self._between(middle + 1, enough - 1)
        retries = self.trials[smallest].retries if smallest < enough else 0
        return Need(smallest * SMALL_SEGMENT, reserved, retries)

    def _between(self, low: int, high: int) -> int:
        """Return a capacity that suffices, where `high` does; with one page less it does not, if rows are left."""
        while low < high and self.rows > 0:
            middle = (low + high) // 2
            if self._suffices(middle):
                high = middle
            else:
                low = middle + 1
        return high

    def _suffices(self, pages: int) -> bool:
        if pages not in self.trials:
            self.trials[pages] = trial(self.tape, self.settings, pages * SMALL_SEGMENT, self.optional)
            self.rows -= self.trials[pages].rows
        return self.trials[pages].rows == len(self.tape)


def _reserved(tape: Tape, settings: Settings) -> int:
    """Return the peak reserved without a limit: as the tape has it where nothing was given back, else by a replay."""
    growth = np.isin(tape.action, GROWTH)
    is_unchanged = settings == Settings.parse(tape.meta.settings) and growth.any()
    if is_unchanged and not np.isin(tape.action, (Action.SEGMENT_FREE, Action.SEGMENT_UNMAP, Action.OOM)).any():
        return int(tape.size[growth].sum())
    return trial(tape, settings, None).reserved


def _live(tape: Tape, optional: NDArray[np.bool_]) -> int:
    """Return the most bytes at once of blocks that are not optional; with less no placement of them is possible."""
    sizes = -(-tape.size // BLOCK) * BLOCK
    is_born = np.isin(tape.action, (Action.ALLOC, Action.PREEXISTING))
    is_freed = tape.action == Action.FREE_COMPLETED
    # The next row of an optional block's address that is an alloc or a free frees it.
    rows = np.flatnonzero(is_born | is_freed)
    rows = rows[np.argsort(tape.address[rows], kind="stable")]
    left_out = optional.copy()
    left_out[rows[1:][optional[rows[:-1]] & is_freed[rows[1:]]]] = True
    changes = np.where(is_born, sizes, 0) - np.where(is_freed, sizes, 0)
    return int(np.cumsum(np.where(left_out, 0, changes)).max(initial=0))
