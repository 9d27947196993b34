"""Write the requests of a program as one short text, to compare programs that run in different processes."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from memexplore.tape import Action

_ALLOCATIONS = (int(Action.ALLOC), int(Action.PREEXISTING))
_FREE, _OOM = int(Action.FREE_REQUESTED), int(Action.OOM)


class RequestSequence(NamedTuple):
    """Requests up to a row of a recording."""

    allocations: int
    digest: str
    """Equal for two recordings whose allocations and frees are equal in order, size and stream."""


def request_sequence(events: Sequence[tuple[int, ...]], streams: Mapping[int, int]) -> RequestSequence:
    """Return the requests of `recorder.events.Event`s; `streams` has the stream of a row, if not the default one.

    Addresses are left out: a free counts by the number of the allocation whose block it frees.

    >>> def event(action, size, block=-1):
    ...     return (0, int(action), 0, size, 0, 0, -1, -1, -1, 0, block, 0)
    >>> kept = [event(Action.ALLOC, 512), event(Action.ALLOC, 512)]
    >>> first, second = (request_sequence([*kept, event(Action.FREE_REQUESTED, 512, row)], {}) for row in (0, 1))
    >>> first.allocations, first == second
    (2, False)
    """
    digest, numbers = hashlib.sha256(), dict[int, int]()
    for row, event in enumerate(events):
        action, size, block = event[1], event[3], event[10]
        if action in _ALLOCATIONS:
            numbers[row] = len(numbers)
            digest.update(b"a%d %d;" % (size, streams.get(row, 0)))
        elif action == _FREE:
            digest.update(b"f%d %d;" % (size, numbers.get(block, -1)))
        elif action == _OOM:
            digest.update(b"o%d;" % size)
    return RequestSequence(len(numbers), digest.hexdigest())
