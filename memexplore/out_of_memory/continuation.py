"""Continue a tape that ends with a failed request: what the program would have asked for next, if it had gone on.

A program repeats itself: what follows in the failing period is what followed the same request in the last complete
period, and after it such a period comes again and again.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from memexplore.analysis.curves import Rows, cached_by_tape, lifetimes
from memexplore.analysis.periods import periods
from memexplore.tape import COLUMNS, Action, Phase, Tape

_MOST_ROWS = 200_000
"""Rows of a continuation; it has fewer repetitions where a period is long."""
_MOST_READ = 400_000
"""Rows of the last periods that are read, besides the last two: what lives longer than these is taken to stay."""
_NEW = 1 << 60
"""The first address of a continuation: none is as high. Addresses only connect a free with its alloc there."""


class Continuation(NamedTuple):
    """A tape with what would follow its failed request."""

    tape: Tape
    """The tape, the failed request as an alloc, and the rows that follow it."""
    repetitions: int
    """Complete periods behind the rest of the failing one; 0 where only one period was complete before."""
    end_of_period: int
    """The row of `tape` before which the rest of the failing period ends."""


def replayed_text(tape: Tape) -> str:
    """Return how much of what follows was replayed, for behind "the run goes on" or "the request fits".

    >>> from memexplore.tape import Meta, Source
    >>> rows = {"action": [Action.OOM], "address": [-1], "size": [8]}
    >>> replayed_text(Tape.from_columns(rows, meta=Meta(Source.PREDICTED, "Tesla T4")))
    'replayed; what follows is not known'
    """
    continued = continuation(tape)
    more = f" and {continued.repetitions} more" if continued is not None and continued.repetitions else ""
    return f"{rest_replayed_text(tape)}{more}"


def rest_replayed_text(tape: Tape) -> str:
    """Return how much was replayed where nothing behind the failing period was."""
    if continuation(tape) is None:
        return "replayed; what follows is not known"
    return f"replayed with the rest of the {periods(tape).unit}"


_Block = tuple[int, int, int]
"""A block by its period, the place of its request, and how often the place has come before in the period."""


@cached_by_tape
def continuation(tape: Tape) -> Continuation | None:
    """Return a tape that ends with a failed request, and what would follow; cached per tape.

    The last complete period is repeated as often as periods were complete. None where no period is, or where the last
    one has no such request: what would follow is not known then.

    >>> from memexplore.tape import Meta, Source
    >>> A, F, C, O = (int(kind) for kind in (Action.ALLOC, Action.FREE_REQUESTED, Action.FREE_COMPLETED, Action.OOM))
    >>> step = {"action": [A, F, C], "address": [1, 1, 1], "size": [8, 8, 8], "op": [0, -1, -1]}
    >>> rows = {name: [*values, *values, values[0]] for name, values in step.items()}
    >>> rows["action"][-1], rows["address"][-1], rows["step"] = O, -1, [1, 1, 1, 2, 2, 2, 3]
    >>> tape = Tape.from_columns(rows, ops=["aten::mm"], meta=Meta(Source.PREDICTED, "Tesla T4"))
    >>> found = continuation(tape)
    >>> found.repetitions, len(found.tape)  # two more periods, behind the frees of the failed one
    (2, 15)

    Raises ValueError for a tape that is not placed.
    """
    ends = _ends(tape)
    if not ends or not len(tape) or tape.action[-1] != Action.OOM:
        return None
    begins = [0, *(end + 1 for end in ends)]
    begin = next((row for row in begins if len(tape) - row <= _MOST_READ), begins[-1])
    period = np.searchsorted(ends, np.arange(len(tape)))
    blocks = _blocks(tape, period, min(begin, begins[-3] if len(begins) > 2 else 0))
    failing, last = len(ends), len(tape) - 1
    # Where a program has failed before, and gone on, the same request has come in the failing period already.
    place, count = blocks[last][1:]
    first = ends[-2] + 1 if len(ends) > 1 else 0
    template = range(first, ends[-1] + 1)
    same = (row for row in template if row in blocks and blocks[row][1:] == (place, count))
    at = next(same, None)
    if at is None:
        return None
    repetitions = failing if failing > 1 else 0
    repetitions = min(repetitions, _MOST_ROWS // max(len(template), 1))
    continued, end = _continued(tape, blocks, template, at, failing, repetitions)
    return Continuation(continued, repetitions, end)


def _ends(tape: Tape) -> list[int]:
    """Return the last row of each complete period, the failing step's too where its update has ended.

    What a program asks for after the update belongs to the next step, as in `periods`.
    """
    found = periods(tape)
    begin = found.ends[-1] + 1 if found.ends else 0
    updates = np.flatnonzero(tape.phase[begin:] == Phase.OPTIMIZER)
    if found.unit != "step" or not len(updates) or tape.phase[-1] != Phase.OTHER:
        return found.ends
    after = begin + int(updates[-1]) + 1
    asks = np.flatnonzero(np.isin(tape.action[after:], (Action.ALLOC, Action.OOM)))
    return [*found.ends, after + int(asks[0]) - 1]


def _blocks(tape: Tape, period: Rows, begin: int) -> dict[int, _Block]:
    """Return the block of each row from `begin` on that asks for memory."""
    asks = np.isin(tape.action, (Action.ALLOC, Action.OOM, Action.PREEXISTING))
    rows = np.flatnonzero(asks & (np.arange(len(tape)) >= begin))
    places = np.stack([getattr(tape, name)[rows] for name in ("op", "module", "stack", "phase")], axis=1)
    _, place = np.unique(places, axis=0, return_inverse=True)
    counts: dict[tuple[int, int], Iterator[int]] = {}
    blocks = {}
    for row, number, where in zip(rows.tolist(), period[rows].tolist(), place.reshape(-1).tolist(), strict=True):
        blocks[row] = (number, where, next(counts.setdefault((number, where), itertools.count())))
    return blocks


def _continued(
    tape: Tape, blocks: dict[int, _Block], template: range, at: int, failing: int, repetitions: int
) -> tuple[Tape, int]:
    life = lifetimes(tape)
    alive = life.requested >= len(tape)
    address = {blocks[row]: int(tape.address[row]) for row in life.born[alive].tolist() if row in blocks}
    lives = zip(life.requested.tolist(), life.born.tolist(), strict=True)
    born = {freed: row for freed, row in lives if row in blocks and freed in template}
    requests = [row for row in template if tape.action[row] == Action.ALLOC and tape.size[row]]
    rows = sorted({*requests, *born})
    new = itertools.count(_NEW)
    last = len(tape) - 1
    address[blocks[last]] = next(new)
    added: list[tuple[int, Action, int]] = [(last, Action.ALLOC, address[blocks[last]])]
    """Row whose other columns are taken, action and address."""
    end = 0
    for number in range(failing, failing + repetitions + 1):
        end = end or (len(added) if number > failing else 0)
        shift = number - failing + 1
        for row in rows:
            if number == failing and row <= at:
                continue
            # A block whose address is handed out again, without a free in between, ends with the request.
            if row in born:
                before, *place = blocks[born[row]]
                freed = address.pop((before + shift, *place), None)  # type: ignore[arg-type]
                if freed is not None:
                    added += [(born[row], Action.FREE_REQUESTED, freed), (born[row], Action.FREE_COMPLETED, freed)]
            if row in blocks and tape.size[row]:
                _, *place = blocks[row]
                given = address[(number, *place)] = next(new)  # type: ignore[index]
                added.append((row, Action.ALLOC, given))
    source = np.array([row for row, _, _ in added])
    columns = {name: np.concatenate((getattr(tape, name)[:last], getattr(tape, name)[source])) for name in COLUMNS}
    columns["action"] = np.concatenate((tape.action[:last], [action for _, action, _ in added]))
    columns["address"] = np.concatenate((tape.address[:last], [given for _, _, given in added]))
    return tape.with_rows(columns), last + (end or len(added))
