"""The memory that a run needs: the smallest capacity with which it goes through, as far as that is known."""

from __future__ import annotations

import dataclasses

import numpy as np
from numpy.typing import NDArray

from memexplore.allocator.replay import trial
from memexplore.allocator.smallest import Need, smallest_capacity
from memexplore.analysis.curves import cached_by_tape, peak
from memexplore.analysis.verdict import failed_request
from memexplore.tape import Action, Category, Os, Source, Tape
from memexplore.tape.allocator_settings import SMALL_SEGMENT, Settings


def need(tape: Tape) -> Need | None:
    """Return the memory that a run needs; None if it is not known how it goes on after the request that failed.

    A run that fits its device needs no more than the device has, and one that does not fit needs more.

    >>> from memexplore.tape import Meta
    >>> meta = Meta(Source.PREDICTED, "Tesla T4", capacity=64 << 20)
    >>> rows = {"action": [Action.ALLOC, Action.FREE_REQUESTED, Action.FREE_COMPLETED, Action.ALLOC],
    ...         "address": [1, 1, 1, 2], "size": [12 << 20, 12 << 20, 12 << 20, 20 << 20]}
    >>> need(Tape.from_columns(rows, meta=meta))
    Need(smallest=20971520, without_pressure=33554432, retries=1)

    Raises ValueError if a row frees an address without a block.
    """
    fits = failed_request(tape) < 0
    run, capacity = tape if fits else tape.whole, tape.meta.capacity
    if run is None:
        return None
    return smallest(run) if capacity is None else need_on(run, capacity, fits=fits)


def need_on(tape: Tape, capacity: int, *, fits: bool) -> Need:
    """Return the memory that a whole run needs which is known to fit a capacity or not to fit it."""
    found = smallest(tape)
    if fits:
        return found._replace(smallest=min(found.smallest, capacity))
    least = max(found.smallest, (capacity // SMALL_SEGMENT + 1) * SMALL_SEGMENT)
    return found._replace(smallest=least, without_pressure=max(found.without_pressure, least))


@cached_by_tape
def smallest(tape: Tape) -> Need:
    """Return the memory with which the requests of a tape go through; cached per tape.

    A run on a CPU has no cache to give back, and a snapshot has a part of a run: these need what they reserved.
    """
    if tape.meta.source is Source.IMPORTED or tape.meta.device == "cpu":
        reserved = peak(tape, "reserved")[0]
        return Need(reserved, reserved, retries=0)
    return smallest_capacity(tape, optional=optional(tape))


@cached_by_tape
def need_with_expandable_segments(tape: Tape) -> Need | None:
    """Return the memory that a whole run would need with expandable segments.

    None on a system without them, and for a snapshot.

    >>> from memexplore.tape import Meta
    >>> rows = {"action": [Action.ALLOC, Action.FREE_REQUESTED, Action.FREE_COMPLETED, Action.ALLOC],
    ...         "address": [1, 1, 1, 2], "size": [12 << 20, 12 << 20, 12 << 20, 20 << 20]}
    >>> need_with_expandable_segments(Tape.from_columns(rows, meta=Meta(Source.PREDICTED, "Tesla T4")))
    Need(smallest=20971520, without_pressure=20971520, retries=0)
    """
    if tape.meta.os is Os.WINDOWS or tape.meta.source is Source.IMPORTED:
        return None
    settings = dataclasses.replace(Settings.parse(tape.meta.settings), expandable_segments=True)
    return smallest_capacity(tape, settings, optional(tape))


def goes_through(tape: Tape, capacity: int) -> bool:
    """Return whether the requests of a tape go through with a capacity, under the tape's own allocator settings."""
    return trial(tape, Settings.parse(tape.meta.settings), capacity, optional(tape)).rows == len(tape)


@cached_by_tape
def optional(tape: Tape) -> NDArray[np.bool_]:
    """Return which rows are requests without which a program goes on: workspaces of convolutions.

    Where one does not fit, the next algorithm is tried (`try_plans` in cudnn/Conv_v8.cpp).

    >>> from memexplore.tape import Meta
    >>> rows = {"size": [1 << 20] * 2, "category": [Category.WORKSPACE] * 2, "op": [0, 1]}
    >>> optional(Tape.from_columns(rows, ops=["aten::convolution", "aten::mm"], meta=Meta(Source.PREDICTED, "T4")))
    array([ True, False])
    """
    convolutions = [number for number, op in enumerate(tape.ops) if "convolution" in op]
    return (tape.category == Category.WORKSPACE) & np.isin(tape.op, convolutions) & (tape.action == Action.ALLOC)


@cached_by_tape
def retries(tape: Tape) -> int:
    """Return how often the allocator releases its cache because its device has no more memory.

    >>> from memexplore.tape import Meta
    >>> rows = {"action": [Action.ALLOC, Action.FREE_REQUESTED, Action.FREE_COMPLETED, Action.ALLOC],
    ...         "address": [1, 1, 1, 2], "size": [12 << 20, 12 << 20, 12 << 20, 20 << 20]}
    >>> retries(Tape.from_columns(rows, meta=Meta(Source.PREDICTED, "Tesla T4", capacity=24 << 20)))
    1
    """
    return trial(tape, Settings.parse(tape.meta.settings), tape.meta.capacity, optional(tape)).retries
