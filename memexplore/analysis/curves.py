"""Curves of a Tape, its peak, and who was alive: one vectorised pass over columns each."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from memexplore.allocator import block_sizes
from memexplore.tape import Action, Category, Tape

Rows = NDArray[np.int64]
CurveName = Literal["requested", "allocated", "active", "reserved"]

_BIRTHS = (Action.ALLOC, Action.PREEXISTING)
_GROWTH = (Action.SEGMENT_ALLOC, Action.SEGMENT_MAP)
_SHRINKING = (Action.SEGMENT_FREE, Action.SEGMENT_UNMAP)


class Lifetimes(NamedTuple):
    """For each alloc or preexisting row when its block was given back; `born` are those rows, all three of one length.

    A row that is not on the tape is ``len(tape)``.
    """

    born: Rows
    requested: Rows
    completed: Rows


def _remembered(function: Callable[[Tape], Any]) -> Callable[[Tape], Any]:
    # A tape is frozen and zooming asks the same of it again and again; the answer goes when the tape goes.
    answers: weakref.WeakKeyDictionary[Tape, Any] = weakref.WeakKeyDictionary()

    @functools.wraps(function)
    def answer(tape: Tape) -> Any:
        if tape not in answers:
            answers[tape] = function(tape)
        return answers[tape]

    return answer


@_remembered
def block_bytes(tape: Tape) -> Rows:
    """Bytes of the block that each alloc or preexisting row handed out, 0 on other rows, remembered for a tape."""
    sizes = block_sizes(tape)
    sizes.flags.writeable = False
    return sizes


@_remembered
def lifetimes(tape: Tape) -> Lifetimes:
    """When each block was born, asked to be freed, and free, as row numbers.

    An alloc at an address that is still taken ends the block before it: its free was not seen. Raises ValueError for
    a tape whose allocs have no addresses yet.
    """
    count = len(tape)
    born_here = np.isin(tape.action, _BIRTHS)
    if np.any(born_here & (tape.address < 0) & (tape.size > 0)):
        raise ValueError("this tape is not placed: call replay(tape) first, which gives every request its address")
    kept = born_here | (tape.action == Action.FREE_REQUESTED) | (tape.action == Action.FREE_COMPLETED)
    kept &= tape.address >= 0
    rows = np.flatnonzero(kept)
    rows = rows[np.argsort(tape.address[rows], kind="stable")]
    action, address = tape.action[rows], tape.address[rows]

    is_birth = np.isin(action, _BIRTHS)
    starts_group = np.ones(len(rows), dtype=bool)
    starts_group[1:] = address[1:] != address[:-1]
    # A block's own rows reach from its birth to just before the next birth or the next address.
    limit = _next(is_birth | starts_group, strictly_after=True)
    births = np.flatnonzero(is_birth)
    limit = limit[births]
    taken_again = np.zeros(len(births), dtype=bool)
    inside = limit < len(rows)
    taken_again[inside] = ~starts_group[limit[inside]]

    rows_and_never = np.append(rows, count)
    never = np.where(taken_again, rows_and_never[limit], count)

    def first(kind: Action) -> Rows:
        position = _next(action == kind, strictly_after=True)[births]
        return np.where(position < limit, rows_and_never[position], count)

    requested, completed = first(Action.FREE_REQUESTED), first(Action.FREE_COMPLETED)
    has_completions = bool(np.any(tape.action == Action.FREE_COMPLETED))
    asked = np.minimum(np.where(requested < count, requested, completed), never)
    done = completed if has_completions else requested
    done = np.minimum(done, never)
    order = np.argsort(rows[births], kind="stable")
    unplaced = np.flatnonzero(born_here & (tape.address < 0))
    if not len(unplaced):
        return Lifetimes(rows[births][order], asked[order], done[order])
    # Empty tensors have no address; they live to the end and weigh nothing.
    born = np.append(rows[births], unplaced)
    order = np.argsort(born, kind="stable")
    forever = np.full(len(unplaced), count)
    return Lifetimes(born[order], np.append(asked, forever)[order], np.append(done, forever)[order])


def _next(here: NDArray[np.bool_], *, strictly_after: bool) -> Rows:
    """For each position the first marked one at or after it; the length where there is none."""
    count = len(here)
    positions = np.where(here, np.arange(count), count)
    following = np.minimum.accumulate(positions[::-1])[::-1]
    return np.append(following[1:], count)[:count] if strictly_after else following


def free_rows(tape: Tape) -> Rows:
    """Row that frees each block: for alloc and preexisting rows the row of its free, `len(tape)` if none, -1 elsewhere.

    The free counts when it is asked for (`free_requested`), as in the allocated curve.

    >>> from memexplore.tape import Meta, Source
    >>> tape = Tape.from_columns({"action": [Action.ALLOC, Action.ALLOC, Action.FREE_REQUESTED],
    ...                           "address": [0, 512, 0], "size": [10, 20, 10]}, meta=Meta(Source.MEASURED, "cpu"))
    >>> free_rows(tape).tolist()
    [2, 3, -1]

    Raises ValueError where the tape is not placed.
    """
    life = lifetimes(tape)
    result = np.full(len(tape), -1, dtype=np.int64)
    result[life.born] = life.requested
    return result


def live_rows(tape: Tape, row: int) -> Rows:
    """Rows of the blocks that are allocated after a row, in the order in which they were born.

    >>> from memexplore.tape import Meta, Source
    >>> tape = Tape.from_columns({"action": [Action.ALLOC, Action.ALLOC, Action.FREE_REQUESTED],
    ...                           "address": [0, 512, 0], "size": [10, 20, 10]}, meta=Meta(Source.MEASURED, "cpu"))
    >>> live_rows(tape, 1).tolist(), live_rows(tape, 2).tolist()
    ([0, 1], [1])

    Raises IndexError for a row that is not on the tape, ValueError where the tape is not placed.
    """
    if not 0 <= row < len(tape):
        raise IndexError(f"row {row} is not on this tape of {len(tape)} rows")
    life = lifetimes(tape)
    return life.born[(life.born <= row) & (life.requested > row)]


def changes(tape: Tape, curve: CurveName) -> Rows:
    """What each row adds to a curve, in bytes; the curve is the running sum."""
    if curve == "reserved":
        grows, shrinks = np.isin(tape.action, _GROWTH), np.isin(tape.action, _SHRINKING)
        if np.any(grows) or np.any(shrinks):
            return np.where(grows, tape.size, 0) - np.where(shrinks, tape.size, 0)
        curve = "active"
    if curve not in ("requested", "allocated", "active"):
        raise ValueError(f"there is no curve {curve!r}: choose requested, allocated, active or reserved")
    life = lifetimes(tape)
    sizes = (tape.size if curve == "requested" else block_bytes(tape))[life.born]
    gone = life.requested if curve == "allocated" else life.completed
    result = np.zeros(len(tape) + 1, dtype=np.int64)
    result[life.born] = sizes
    # A row ends at most one block, so plain indexing is enough; the extra last row takes what is never freed.
    result[gone] -= sizes
    return result[:-1]


def curve(tape: Tape, name: CurveName = "allocated") -> Rows:
    """Value of a curve after each row, in bytes.

    `allocated` falls when a free is asked for, `active` and `requested` when it is done (DESIGN.md, section 2).
    `reserved` is the sum of segments; a tape without segment rows (a CPU has no caching allocator) reserves what is
    active.

    >>> from memexplore.tape import Meta, Source
    >>> tape = Tape.from_columns({"action": [Action.ALLOC, Action.ALLOC, Action.FREE_REQUESTED],
    ...                           "address": [0, 512, 0], "size": [10, 20, 10]}, meta=Meta(Source.MEASURED, "cpu"))
    >>> curve(tape, "allocated").tolist()
    [10, 30, 20]

    Raises ValueError for an unknown curve or a tape that is not placed.
    """
    return np.cumsum(changes(tape, name))


def peak(tape: Tape, curve: CurveName = "allocated") -> tuple[int, int]:
    """Highest value of a curve in bytes, and the first row after which it is reached.

    >>> from memexplore.tape import Meta, Source
    >>> tape = Tape.from_columns({"action": [Action.ALLOC, Action.FREE_REQUESTED], "address": [0, 0], "size": [10, 10]},
    ...                          meta=Meta(Source.MEASURED, "cpu"))
    >>> peak(tape)
    (10, 0)

    An empty tape has its peak of 0 bytes at row -1. Raises ValueError as `curve` does.
    """
    values = np.cumsum(changes(tape, curve))
    if not len(values):
        return 0, -1
    row = int(np.argmax(values))
    return int(values[row]), row


def by_category(
    tape: Tape, curve: Literal["requested", "allocated", "active"] = "allocated", window: slice = slice(None)
) -> Rows:
    """Bytes of each category after each row: shape (len(Category), rows of the window).

    The sum over categories is the curve.

    >>> from memexplore.tape import Meta, Source
    >>> tape = Tape.from_columns({"address": [0, 512], "size": [10, 20], "category": [Category.INPUT, Category.BUFFER]},
    ...                          meta=Meta(Source.MEASURED, "cpu"))
    >>> by_category(tape)[Category.INPUT].tolist(), by_category(tape)[Category.BUFFER].tolist()
    ([10, 10], [0, 20])

    Raises ValueError as `curve` does.
    """
    first, last, _ = window.indices(len(tape))
    life = lifetimes(tape)
    sizes = (tape.size if curve == "requested" else block_bytes(tape))[life.born]
    gone = life.requested if curve == "allocated" else life.completed
    category = tape.category[life.born].astype(np.int64)
    # Everything before the window goes into its first row, so a window costs what it shows and no more.
    width = max(last - first, 0)
    result = np.zeros((len(Category), width), dtype=np.int64)
    if not width:
        return result
    for rows, signed in ((life.born, sizes), (gone, -sizes)):
        seen = rows < last
        np.add.at(result, (category[seen], np.maximum(rows[seen] - first, 0)), signed[seen])
    return np.cumsum(result, axis=1, out=result)
