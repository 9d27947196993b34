"""Match the recorded rows with the allocator's history of the same run, and find the op of each row not recorded.

A block is found by address and size, in the order of the ops: an op may have requested and freed a block of the same
place for itself before. The numbers of the ops in the stacks of the history, if it has any, say which op ran.
"""

from __future__ import annotations

from bisect import bisect_right
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from memexplore.recorder.op_numbers import COUNT, OpNumbers, Quiet
from memexplore.tape import Action, Tape

Rows = NDArray[np.int64]


class Numbers(NamedTuple):
    """The numbers of the ops of a recording, and the numbers in the stacks of its history."""

    ops: OpNumbers
    in_history: Rows
    """For each row of the history the number of the running op modulo `COUNT`, -1 without one."""


class Requests:
    """The allocs of a history by place; each belongs to one recorded row."""

    def __init__(self, history: Tape, numbers: Numbers | None) -> None:
        self._rows: dict[tuple[int, int], list[int]] = {}
        allocs = np.flatnonzero(history.action == Action.ALLOC)
        places = zip(history.address[allocs].tolist(), history.size[allocs].tolist(), strict=True)
        for row, place in zip(allocs.tolist(), places, strict=True):
            self._rows.setdefault(place, []).append(row)
        self._number = None if numbers is None else numbers.in_history
        # Rows of one op follow each other without a row of another.
        self._run = np.zeros(len(history), dtype=np.int64)
        if self._number is not None and len(allocs):
            number = self._number[allocs]
            self._run[allocs] = np.cumsum(np.append(True, number[1:] != number[:-1]))

    def take(self, place: tuple[int, int], after: int, number: int) -> int:
        """Return the row of a block that an op left, the next after a row, and use it up; -1 without one."""
        rows = self._rows.get(place)
        if not rows:
            return -1
        first = bisect_right(rows, after)
        # Of two threads, one may have allocated before and was recorded after the other.
        for at in (*range(first, len(rows)), *range(first - 1, -1, -1)):
            if self._number is None:
                return rows.pop(at)
            if self._number[rows[at]] in (number % COUNT, -1):
                while at + 1 < len(rows) and self._run[rows[at + 1]] == self._run[rows[at]]:
                    at += 1
                return rows.pop(at)
        return -1

    def left(self, place: tuple[int, int]) -> list[int]:
        """Return the rows of a place that no recorded row has used, which the caller may use up."""
        return self._rows.get(place, [])


def numbers_of_rows(recorded: Tape, numbers: Numbers | None) -> Rows:
    """Return for each recorded alloc and oom row the number of its op, -1 in other rows and without numbers."""
    result = np.full(len(recorded), -1, dtype=np.int64)
    rows = np.flatnonzero(np.isin(recorded.action, (Action.ALLOC, Action.OOM)))
    if numbers is not None and len(numbers.ops.of_requests) == len(rows):
        result[rows] = numbers.ops.of_requests
    return result


def matches(history: Tape, recorded: Tape, numbers: Numbers | None = None) -> Rows:
    """Return the matching row of the history for each recorded alloc, free and oom row, -1 for none."""
    result = np.full(len(recorded), -1, dtype=np.int64)
    requests, number = Requests(history, numbers), numbers_of_rows(recorded, numbers)
    rows = np.flatnonzero(recorded.action == Action.ALLOC)
    op = number if numbers is not None else recorded.op
    after = last = -1
    before: int | None = None
    columns = (recorded.address, recorded.size, number, op)
    for row, address, size, of_row, group in zip(
        rows.tolist(), *(column[rows].tolist() for column in columns), strict=True
    ):
        if group != before:
            # The outputs of one op may be recorded in another order than they were made.
            before, after = group, last
        result[row] = match = requests.take((address, size), after, of_row)
        last = max(last, match)
    _match_older(history, recorded, requests, result)
    freed = _frees(history)
    for block, row in _frees(recorded).items():
        if result[block] >= 0:
            result[row] = freed.get(int(result[block]), -1)
    # From the last to the first, as an op may run out of memory and try again with a smaller request.
    failed = [np.flatnonzero(tape.action == Action.OOM)[::-1] for tape in (recorded, history)]
    for row, history_row in zip(*failed, strict=False):
        result[row] = history_row
    return result


def _match_older(history: Tape, recorded: Tape, requests: Requests, result: Rows) -> None:
    """Find the blocks that are older for the recorder: older than the history, or made where it sees no op."""
    older: dict[tuple[int, int], list[int]] = {}
    for row in np.flatnonzero(history.action == Action.PREEXISTING)[::-1].tolist():
        older.setdefault((int(history.address[row]), int(history.size[row])), []).append(row)
    freed = _frees(history)
    for row in np.flatnonzero(recorded.action == Action.PREEXISTING).tolist():
        place = int(recorded.address[row]), int(recorded.size[row])
        if older.get(place):
            result[row] = older[place].pop()
        elif left := requests.left(place):
            longest = max(left, key=lambda alloc: freed.get(alloc, len(history)) - alloc)
            left.remove(longest)
            result[row] = longest


def _frees(tape: Tape) -> dict[int, int]:
    """Return for the row of each block the row that requests its free."""
    result: dict[int, int] = {}
    open_blocks: dict[int, int] = {}
    for row in np.flatnonzero(np.isin(tape.action, (Action.ALLOC, Action.PREEXISTING, Action.FREE_REQUESTED))).tolist():
        address = int(tape.address[row])
        if tape.action[row] != Action.FREE_REQUESTED:
            open_blocks[address] = row
        elif address in open_blocks:
            result[open_blocks.pop(address)] = row
    return result


class Unseen(NamedTuple):
    """The requests of a history that were not recorded."""

    rows: Rows
    belongs_to: Rows
    """For each the recorded row whose op made it; -1 for none, and for an op without a recorded row."""
    quiet: dict[int, Quiet]
    """Position among `rows` -> op without a recorded row."""
    is_scratch: NDArray[np.bool_]
    """Whether each was freed by the op that made it."""
    follows_output: NDArray[np.bool_]
    """Whether each was requested after an output of its op."""


def unseen(history: Tape, recorded: Tape, match: Rows, numbers: Numbers | None) -> Unseen:
    """Return the requests of a history that no recorded row matches, each with the op that made it.

    Without numbers the op is the one in front.
    """
    recorded_row = np.full(len(history) + 1, -1, dtype=np.int64)
    matched = np.flatnonzero((match >= 0) & np.isin(recorded.action, (Action.ALLOC, Action.OOM)))
    recorded_row[match[matched]] = matched
    older = np.flatnonzero((match >= 0) & (recorded.action == Action.PREEXISTING))
    is_known = np.zeros(len(history), dtype=bool)
    is_known[match[matched]] = is_known[match[older]] = True
    rows = np.flatnonzero((history.action == Action.ALLOC) & ~is_known)
    position = np.arange(len(history))
    before = np.maximum.accumulate(np.where(recorded_row[:-1] >= 0, position, -1))
    after = np.minimum.accumulate(np.where(recorded_row[:-1] >= 0, position, len(history))[::-1])[::-1]
    front, behind = recorded_row[before[rows]], recorded_row[after[rows]]
    front[before[rows] < 0] = -1
    freed = _frees(history)
    ends = np.array([freed.get(row, len(history)) for row in rows.tolist()], dtype=np.int64)
    if numbers is None:
        return Unseen(rows, front, {}, ends < len(history), np.zeros(len(rows), dtype=bool))
    return _of_numbers(history, rows, front, behind, ends, numbers, numbers_of_rows(recorded, numbers))


def _of_numbers(
    history: Tape, rows: Rows, front: Rows, behind: Rows, ends: Rows, numbers: Numbers, number: Rows
) -> Unseen:
    belongs_to = np.full(len(rows), -1, dtype=np.int64)
    quiet: dict[int, Quiet] = {}
    count = max(int(number.max(initial=-1)), numbers.ops.last_quiet) + 1
    with_end = np.append(number, -1)
    labels = numbers.in_history[rows]
    columns = (front, behind, with_end[front], with_end[behind], labels)
    for at, (left, right, begin, end, label) in enumerate(zip(*(column.tolist() for column in columns), strict=True)):
        if label < 0:
            continue
        if left >= 0 and begin % COUNT == label:
            belongs_to[at] = left
        elif right >= 0 and end % COUNT == label:
            belongs_to[at] = right
        else:
            stop = end if right >= 0 else count
            first = begin + 1 + (label - begin - 1) % COUNT
            op = numbers.ops.quiet(range(first, stop, COUNT))
            if op is None:
                belongs_to[at] = left
            else:
                quiet[at] = op
    allocs = np.flatnonzero(history.action == Action.ALLOC)
    following = np.append(allocs, len(history))
    label_at = np.append(numbers.in_history, -2)
    # The first later request of another op.
    ordered = label_at[following]
    changes = np.append(np.flatnonzero(ordered[1:] != ordered[:-1]) + 1, len(following) - 1)
    positions = np.searchsorted(allocs, rows)
    other = following[changes[np.searchsorted(changes, positions, side="right").clip(max=len(changes) - 1)]]
    follows_output = (front >= 0) & (with_end[front] % COUNT == labels) & (belongs_to == front)
    return Unseen(rows, belongs_to, quiet, ends < other, follows_output)
