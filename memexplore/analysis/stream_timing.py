"""Compute the peaks of a simulated run under other timings of the GPU.

On its tape every free ends at once. Frees that wait for another stream (`Tensor.record_stream`) may end as late as
before given rows, which gives a higher reserved peak; frees of what only a collective held may begin as early as before
given rows, which gives lower peaks.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from memexplore.allocator.placement import placement_on
from memexplore.allocator.replay import replay_placed
from memexplore.analysis.curves import peak
from memexplore.tape import Action, Tape
from memexplore.text.units import size_text


def late_tape(tape: Tape, ends: Mapping[int, int]) -> Tape:
    """Return a tape where frees end later, replayed.

    `ends` gives for a free, by its place among all FREE_REQUESTED rows, the row of `tape` before which it ends.

    >>> from memexplore.tape import Meta, Source
    >>> rows = {"action": [Action.ALLOC, Action.FREE_REQUESTED, Action.FREE_COMPLETED, Action.ALLOC],
    ...         "address": [1, 1, 1, 1], "size": [100] * 4}
    >>> later = late_tape(Tape.from_columns(rows, meta=Meta(Source.PREDICTED, "T4")), {0: 4})
    >>> [Action(action).name for action in later.action if action != Action.SEGMENT_ALLOC]
    ['ALLOC', 'FREE_REQUESTED', 'ALLOC', 'FREE_COMPLETED']

    Raises ValueError for a tape without placed segments that begins with blocks, as `replay_placed` does.
    """
    # A free is two rows, the second of which is its end.
    requested = np.flatnonzero(tape.action == Action.FREE_REQUESTED)
    return _replayed(_with_own_addresses(tape), {int(requested[free]) + 1: row for free, row in ends.items()})


def _replayed(tape: Tape, moves: Mapping[int, int]) -> Tape:
    """Replay a tape after each row that is a key of `moves` has moved before the row of the tape that is its value."""
    place = np.arange(len(tape), dtype=float)
    for row, to in moves.items():
        place[row] = to - 0.5
    return replay_placed(tape[np.argsort(place, kind="stable")], placement_on(tape.meta.os))


def _with_own_addresses(tape: Tape) -> Tape:
    """Return a tape on which no two blocks have an address in common: a block may be freed after another took it."""
    address = tape.address.copy()
    own: dict[int, int] = {}
    for row, (action, before) in enumerate(zip(tape.action.tolist(), tape.address.tolist(), strict=True)):
        if action in (Action.ALLOC, Action.PREEXISTING):
            own[before] = row
        if action in (Action.ALLOC, Action.PREEXISTING, Action.FREE_REQUESTED, Action.FREE_COMPLETED):
            address[row] = own.get(before, before)
    return tape.replace(address=address)


def with_late_peak(tape: Tape, ends: Mapping[int, int]) -> Tape:
    """Return a tape with `Meta.late_reserved` and a note on it, for frees that may end late (`late_tape`).

    Where such a run would run out of memory, the peak is the one on a GPU without a limit.
    """
    own = peak(tape, "reserved")[0]
    late = late_tape(tape, ends)
    if np.any(late.action == Action.OOM):
        late = late_tape(tape.replace(meta=tape.meta._replace(capacity=None)), ends)
    highest = max(peak(late, "reserved")[0], own)
    note = (
        "the memory of tensors that another stream uses (record_stream, which FSDP 1 calls) is free again at once; a "
        f"GPU that lags behind the program reserves up to {size_text(highest)} instead of {size_text(own)}"
    )
    notes = tape.meta.notes if highest == own else (*tape.meta.notes, note)
    return tape.replace(meta=tape.meta._replace(late_reserved=highest, notes=notes))


def early_tape(tape: Tape, begins: Mapping[int, int]) -> Tape:
    """Return a tape where frees are earlier, replayed.

    `begins` gives for a free, by its place among all FREE_REQUESTED rows, the row of `tape` before which it begins.

    >>> from memexplore.tape import Meta, Source
    >>> rows = {"action": [Action.ALLOC, Action.ALLOC, Action.FREE_REQUESTED, Action.FREE_COMPLETED],
    ...         "address": [1, 2, 1, 1], "size": [100] * 4}
    >>> earlier = early_tape(Tape.from_columns(rows, meta=Meta(Source.PREDICTED, "T4")), {0: 1})
    >>> [Action(action).name for action in earlier.action if action != Action.SEGMENT_ALLOC]
    ['ALLOC', 'FREE_REQUESTED', 'FREE_COMPLETED', 'ALLOC']

    Raises ValueError for a tape without placed segments that begins with blocks, as `replay_placed` does.
    """
    requested = np.flatnonzero(tape.action == Action.FREE_REQUESTED)
    both = (0, 1)  # the rows of a free
    return _replayed(tape, {int(requested[free]) + offset: row for free, row in begins.items() for offset in both})


def with_early_peaks(tape: Tape, begins: Mapping[int, int]) -> Tape:
    """Return a tape with `Meta.early_allocated`, `Meta.early_reserved` and a note, for earlier frees (`early_tape`)."""
    early = early_tape(tape, begins)
    own, allocated = peak(tape)[0], peak(early)[0]
    note = (
        "an asynchronous collective holds its inputs until the program waits for it; a GPU that does not lag frees "
        f"them before, and allocates at least {size_text(allocated)} instead of {size_text(own)}"
    )
    notes = tape.meta.notes if allocated == own else (*tape.meta.notes, note)
    reserved = min(peak(early, "reserved")[0], peak(tape, "reserved")[0])
    return tape.replace(meta=tape.meta._replace(early_allocated=allocated, early_reserved=reserved, notes=notes))
