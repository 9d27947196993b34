"""Look for the leak of a watched run and who holds it, rarely, for its page."""

from __future__ import annotations

import math
import time

from memexplore.live.leaks import Leak
from memexplore.live.live import Live

_SECONDS = 2.0
"""Least time between two looks for a leak; longer where a look is expensive."""
_SHARE = 0.005
_SECONDS_FOR_HOLDERS = 1.0
_clock = time.perf_counter


class ShownLeak:
    """The leak of a watched run as its page shows it."""

    def __init__(self, live: Live) -> None:
        self._live = live
        self._leak: Leak | None = None
        self._next = 0.0
        self.held_by: list[str] = []

    def find(self) -> Leak | None:
        """Return the leak, as it was at the last look."""
        began = _clock()
        if began >= self._next:
            self._leak = self._live.leak()
            self._next = _clock() + max(_SECONDS, (_clock() - began) / _SHARE)
        return self._leak

    def find_holders(self) -> None:
        """Look for who holds the leak, if nobody was found before: every page asks, and the training waits."""
        if not self.held_by:
            self.held_by = self._live.held_by(_SECONDS_FOR_HOLDERS)

    def end(self) -> None:
        """Look for the leak and its holders for the last time: what a later cell deletes names no line any more."""
        self._next = 0.0
        leak = self.find()
        self._next = math.inf
        if leak is not None:
            self.held_by = self._live.held_by(_SECONDS_FOR_HOLDERS)
