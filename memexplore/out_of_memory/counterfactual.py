"""Replay a tape that ends with a failed request under other conditions: would the request have succeeded?

The conditions are other allocator settings, more memory, and blocks that are freed earlier.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection

import numpy as np

from memexplore.allocator import replay
from memexplore.analysis.curves import Rows, block_bytes, curve, lifetimes, live_rows
from memexplore.analysis.periods import periods
from memexplore.tape import COLUMNS, Action, Tape
from memexplore.tape.allocator_settings import Settings
from memexplore.tape.process_limit import limited

_RISES = 3
"""Rises of the size of calls, without a fall, from which the next calls are expected to ask for more again."""
_FEW_CALLS = 8
"""Calls of one place that a cure has to leave room for, at least."""
_MOST_ROWS = 3_000_000
"""Rows of a tape that is replayed; a longer one takes too long for an answer."""


def fits_expandable(tape: Tape) -> bool:
    """Return whether the request succeeds with expandable segments; False where the tape has them already.

    >>> from memexplore.tape import Meta, Source
    >>> MIB = 1 << 20
    >>> A, F, C, O = (int(each) for each in (Action.ALLOC, Action.FREE_REQUESTED, Action.FREE_COMPLETED, Action.OOM))
    >>> rows = {"action": [A, A, F, C, F, C, A, A, O], "address": [1, 2, 1, 1, 2, 2, 3, 4, -1],
    ...         "size": [size * MIB for size in (20, 20, 20, 20, 20, 20, 12, 12, 50)]}
    >>> meta = Meta(Source.PREDICTED, "85 MiB GPU", capacity=85 * MIB)
    >>> fits_expandable(Tape.from_columns(rows, meta=meta))  # 8 MiB are free in each of two segments, 45 outside
    True
    """
    settings = _settings(tape)
    if settings is None or settings.expandable_segments:
        return False
    return _succeeds(tape, dataclasses.replace(settings, expandable_segments=True))


def fits_with(tape: Tape, more: int) -> bool:
    """Return whether the request succeeds on a device with `more` bytes, under the same limit of the process."""
    device = limited(tape.meta, None)
    if device.capacity is None or more <= 0:
        return False
    meta = limited(device._replace(capacity=device.capacity + more), tape.meta.limit)
    return meta.capacity != tape.meta.capacity and _succeeds(tape.replace(meta=meta), None)


def fits_without_limit(tape: Tape) -> bool:
    """Return whether the request succeeds without the limit of the process; False where no limit lowers the capacity.

    >>> from memexplore.tape import Meta, Source
    >>> meta = limited(Meta(Source.PREDICTED, "8 MiB GPU", capacity=8 << 20), 1 << 20)
    >>> tape = Tape.from_columns({"action": [Action.OOM], "address": [-1], "size": [1024]}, meta=meta)
    >>> fits_without_limit(tape), fits_with(tape, 8 << 20)
    (True, False)
    """
    settings = _settings(tape)
    if tape.meta.capacity_without_limit is None or settings is None:
        return False
    free = tape.replace(meta=limited(tape.meta, None))
    return _succeeds(free, dataclasses.replace(settings, per_process_memory_fraction=1.0))


def fits_without(tape: Tape, rows: Collection[int], failing: int | None = None) -> bool:
    """Return whether a tape goes through if the blocks of some alloc rows are freed after the last of these rows.

    Where that leaves gaps, they are also freed only before the request that failed, by default the last row, when the
    allocator releases what is free.
    """
    if not len(rows):
        return False
    before = len(tape) - 1 if failing is None else failing
    return any(_succeeds(freed_at(tape, rows, at), None) for at in dict.fromkeys((max(rows) + 1, before)))


def freed_at(tape: Tape, rows: Collection[int], at: int) -> Tape:
    """Return a tape in which the blocks of some alloc rows are freed before row `at`, and not again later."""
    blocks = np.sort(np.fromiter(rows, dtype=np.int64))
    life = lifetimes(tape)
    ends = np.stack([life.requested, life.completed])[:, np.isin(life.born, blocks)]
    again = ends[(ends >= at) & (ends < len(tape))]
    count = len(blocks)
    columns = {}
    for name in COLUMNS:
        values = np.repeat(getattr(tape, name)[blocks], 2)
        if name == "action":
            values = np.tile([Action.FREE_REQUESTED, Action.FREE_COMPLETED], count)
        elif name in ("op", "module", "stack", "tensor", "workspace"):
            values = np.full(2 * count, -1)
        elif name in ("time", "step", "phase"):
            values = np.full(2 * count, getattr(tape, name)[at])
        column = getattr(tape, name)
        columns[name] = np.concatenate((column[:at], values, np.delete(column, again)[at:]))
    return tape.with_rows(columns)


def missing(tape: Tape) -> int:
    """Return the bytes that are missing for the request, if every free byte could be used for it; at least 0."""
    last, capacity = len(tape) - 1, tape.meta.capacity
    if capacity is None or last < 0:
        return 0
    return max(int(curve(tape, "active")[last]) + int(tape.size[last]) - capacity, 0)


def unused(tape: Tape) -> int:
    """Return the bytes that are free when the request fails, in gaps between blocks and outside of segments."""
    last, capacity = len(tape) - 1, tape.meta.capacity
    if last < 0:
        return 0
    total = int(curve(tape, "reserved")[last]) if capacity is None else capacity
    return max(total - int(curve(tape, "active")[last]), 0)


def _calls(tape: Tape) -> Rows:
    """Return the requests of the failing op, layer and line, the failed one included."""
    last = len(tape) - 1
    same = np.isin(tape.action, (Action.ALLOC, Action.OOM))
    for name in ("op", "module", "stack"):
        column = getattr(tape, name)
        same &= column == column[last]
    return np.flatnonzero(same)


def largest_before(tape: Tape) -> int | None:
    """Return the bytes of the largest request of the failing call in earlier periods; None without one."""
    ends = periods(tape).ends
    calls = _calls(tape)
    calls = calls[calls <= (ends[-1] if ends else -1)]
    return int(tape.size[calls].max()) if len(calls) else None


def soon_full(tape: Tape) -> bool:
    """Return whether memory grew with each of the last calls, so that what is free is used up by a few more of them."""
    growth = np.diff(curve(tape, "active")[_calls(tape)[-_RISES - 1 :]])
    return len(growth) == _RISES and bool(np.all(growth > 0)) and unused(tape) < _FEW_CALLS * int(growth.min())


def asks_for_more(tape: Tape) -> bool:
    """Return whether the last calls of the failing op, layer and line asked for ever more.

    Several layers may ask for the same size before the size rises, such as those of a cache of keys and values.
    """
    changes = np.diff(tape.size[_calls(tape)])
    falls = np.flatnonzero(changes < 0)
    since = changes[falls[-1] + 1 :] if len(falls) else changes
    return int(np.count_nonzero(since > 0)) >= _RISES


def bytes_of(tape: Tape, rows: Collection[int]) -> int:
    """Return the allocated bytes of the blocks of some alloc rows."""
    return int(block_bytes(tape)[np.fromiter(rows, dtype=np.int64)].sum()) if rows else 0


def alive(tape: Tape) -> Rows:
    """Return the alloc rows of the blocks allocated when the request failed."""
    return live_rows(tape, len(tape) - 1)


def _settings(tape: Tape) -> Settings | None:
    try:
        return Settings.parse(tape.meta.settings)
    except ValueError:  # of a build with settings that are not modelled
        return None


def _succeeds(tape: Tape, settings: Settings | None) -> bool:
    if len(tape) > _MOST_ROWS or _settings(tape) is None:
        return False
    try:
        replayed = replay(tape, settings)
    except ValueError:  # a file with frees of blocks that it does not have
        return False
    return not np.any(replayed.action[-1:] == Action.OOM)
