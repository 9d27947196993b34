"""Decide which steps are recorded completely, by what recording costs and by what has changed.

Recording is paid from a credit that grows with the time watched, so that its share of the run stays near `SHARE`,
whatever a recorded step costs.
"""

from __future__ import annotations

import enum

SHARE = 0.02
"""Share of the watched time that recorded steps may take beyond the time of light ones."""
_AHEAD = 10
"""Recorded steps that may be taken before their time is earned, where something new happens."""

_LEAST_COST = 0.01
"""Cost of a recorded step in light steps where none was measured, because times vary."""


class Cause(enum.StrEnum):
    """Why a step is recorded completely."""

    FIRST = "first steps"
    PERIODIC = "every n-th step"
    NEW_SHAPES = "inputs of new shapes"
    ROSE = "after the peak rose"
    LEAK = "memory keeps rising"
    ASKED = "asked for"
    SWITCHED = "first step of a setting"


class Schedule:
    """Decides which steps are recorded. `every` None records as often as the credit allows."""

    def __init__(self, first: int, every: int | None) -> None:
        self._first, self._every = first, every
        self._credit = 0.0
        self._cost = 0.0
        """Seconds that one recorded step takes beyond a light one, as last measured."""
        self._light: float | None = None
        """Seconds of a light step, a running mean."""
        self._shortest = float("inf")
        """Seconds of the shortest recorded step before the first light one."""
        self._unpaid = 0
        """Steps recorded before the first light one."""
        self._asked: Cause | None = None
        self.spent = 0.0
        """Seconds that all recorded steps took beyond light ones."""

    def ask(self, cause: Cause) -> None:
        """Ask for the next step to be recorded."""
        self._asked = cause

    def next(self, step: int) -> Cause | None:
        """Return why the step of a number is recorded from its begin on, None for a light step."""
        if step <= self._first:
            return Cause.FIRST
        asked, self._asked = self._asked, None
        if asked in (Cause.ASKED, Cause.SWITCHED) or (asked is not None and self._may_go_ahead()):
            return asked
        if self._every is not None:
            return Cause.PERIODIC if step % self._every == 0 else None
        return Cause.PERIODIC if self._cost and self._credit >= self._cost else None

    def on_new_shapes(self) -> bool:
        """Return whether a step whose inputs have new shapes is recorded from the call of the model on."""
        return self._may_go_ahead()

    def _may_go_ahead(self) -> bool:
        if self._light is None:
            return self._unpaid < _AHEAD
        return self._credit >= -_AHEAD * self._cost

    def light(self, seconds: float) -> None:
        """Note the time of a light step."""
        if self._light is None:
            self._light = seconds
            measured = self._shortest - seconds if self._unpaid else 0.0
            self._cost = max(measured, _LEAST_COST * seconds)
            self._credit -= max(self._unpaid - self._first, 0) * self._cost
        self._light += 0.1 * (seconds - self._light)
        self._credit = min(self._credit + SHARE * seconds, _AHEAD * self._cost)

    def recorded(self, seconds: float) -> None:
        """Note the time of a recorded step, with the time that beginning and ending its recording took."""
        if self._light is None:
            # Nothing to compare with yet, and the first step also fills caches.
            self._shortest = min(self._shortest, seconds)
            self._unpaid += 1
            return
        extra = max(seconds - self._light, 0.0)
        self._cost = max(0.5 * (self._cost + extra), _LEAST_COST * self._light)
        self._credit += SHARE * seconds - extra
        self.spent += extra
