"""Follow the frees that the timing of a GPU decides: frees that may end late, and frees that may begin early.

A free that waits for another stream (`Tensor.record_stream`) ends at the latest before some event of the program; a
free of a block that only a collective held begins at the earliest before one. A virtual GPU has no timing: there the
work of each stream ends at once, and a collective holds its inputs until the program waits for it.
"""

from __future__ import annotations

from typing import NamedTuple


class _Order(NamedTuple):
    """From event `since` on, `stream` has waited for all work of `other` up to event `until`."""

    stream: int
    since: int
    other: int
    until: int


_MAX_ORDERS = 1000
"""Older ones are forgotten: then a free may seem to end later than it does."""


class LateFrees:
    """The frees of one recording that wait for other streams."""

    def __init__(self) -> None:
        self.uses: dict[int, set[int]] = {}
        """Row of a block -> streams other than its own that use it."""
        self.ends: dict[int, int | None] = {}
        """Event of a free -> the event before which it ends at the latest, None if nothing waits for it."""
        self._waiting: dict[int, set[int]] = {}
        """Event of a free -> streams that it waits for."""
        self._orders: list[_Order] = []

    def freed(self, row: int, event: int) -> None:
        """Note that the block of a row is freed by an event."""
        streams = self.uses.pop(row, None)
        if streams:
            self._waiting[event] = streams
            self.ends[event] = None

    def ordered(self, stream: int, now: int, other: int, until: int) -> None:
        """Note that a stream waits for another one's work up to an event."""
        del self._orders[:-_MAX_ORDERS]
        self._orders.append(_Order(stream, now, other, until))

    def finished(self, stream: int | None, until: int, now: int) -> None:
        """Note that the program has waited for the work of a stream up to an event, or of all streams for None."""
        reached = None if stream is None else self._reached(stream, until)
        for event, streams in list(self._waiting.items()):
            left = set() if reached is None else {other for other in streams if reached.get(other, 0) <= event}
            if left:
                self._waiting[event] = left
            else:
                del self._waiting[event]
                self.ends[event] = now

    def _reached(self, stream: int, until: int) -> dict[int, int]:
        """Return how far each stream has got when one has reached an event."""
        reached = {stream: until}
        for order in reversed(self._orders):
            if order.since <= reached.get(order.stream, -1):
                reached[order.other] = max(reached.get(order.other, 0), order.until)
        return reached


class EarlyFrees:
    """The frees of one recording that a GPU which does not lag makes earlier."""

    def __init__(self) -> None:
        self.begins: dict[int, int] = {}
        """Event of a free -> the event before which it begins at the earliest."""
        self.free_from: dict[int, int] = {}
        """Row of a block -> the event before which it may be free."""

    def may_be_free(self, row: int, now: int) -> None:
        """Note that the block of a row may be free from now on."""
        self.free_from.setdefault(row, now)

    def freed(self, row: int, event: int) -> None:
        """Note that the block of a row is freed by an event."""
        begin = self.free_from.pop(row, event)
        if begin < event:
            self.begins[event] = begin
