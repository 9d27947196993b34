"""Compute the curves of a Tape (bytes after each row), their peak, and the lifetimes of blocks, all vectorised."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from memexplore.allocator import block_sizes
from memexplore.allocator.actions import GROWTH
from memexplore.tape import Action, Category, Tape

Rows = NDArray[np.int64]
CurveName = Literal["requested", "allocated", "active", "reserved"]

_BIRTHS = (Action.ALLOC, Action.PREEXISTING)
_SHRINKING = (Action.SEGMENT_FREE, Action.SEGMENT_UNMAP)


class Lifetimes(NamedTuple):
    """Lifetimes of blocks as row numbers; three columns of equal length, ``len(tape)`` for a row after the end."""

    born: Rows
    """The alloc or preexisting row of each block."""
    requested: Rows
    """The row in which the program frees the block."""
    completed: Rows
    """The row after which the allocator can reuse the block."""


def cached_by_tape(function: Callable[[Tape], Any]) -> Callable[[Tape], Any]:
    """Keep the result of a function of a tape as long as the tape."""
    # A tape is immutable and every zoom needs the same result; the cache entry dies with the tape.
    results: weakref.WeakKeyDictionary[Tape, Any] = weakref.WeakKeyDictionary()

    @functools.wraps(function)
    def cached(tape: Tape) -> Any:
        if tape not in results:
            results[tape] = function(tape)
        return results[tape]

    return cached


@cached_by_tape
def block_bytes(tape: Tape) -> Rows:
    """Return the block size of each alloc or preexisting row in bytes, 0 in other rows; cached per tape."""
    sizes = block_sizes(tape)
    sizes.flags.writeable = False
    return sizes


@cached_by_tape
def lifetimes(tape: Tape) -> Lifetimes:
    """Return the lifetime of every block as row numbers; cached per tape.

    An alloc at an address that is still in use ends the block there: the tape lacks its free row.

    Raises ValueError for a tape whose allocs have no addresses.
    """
    count = len(tape)
    born_here = np.isin(tape.action, _BIRTHS)
    if np.any(born_here & (tape.address < 0) & (tape.size > 0)):
        raise ValueError("this tape is not placed: call memexplore.replay(tape) first, which assigns every address")
    kept = born_here | (tape.action == Action.FREE_REQUESTED) | (tape.action == Action.FREE_COMPLETED)
    kept &= tape.address >= 0
    rows = np.flatnonzero(kept)
    rows = rows[np.argsort(tape.address[rows], kind="stable")]
    action, address = tape.action[rows], tape.address[rows]

    is_birth = np.isin(action, _BIRTHS)
    starts_group = np.ones(len(rows), dtype=bool)
    starts_group[1:] = address[1:] != address[:-1]
    # The rows of a block end before the next alloc at its address or the first row of the next address.
    limit = _next(is_birth | starts_group)
    births = np.flatnonzero(is_birth)
    limit = limit[births]
    taken_again = np.zeros(len(births), dtype=bool)
    inside = limit < len(rows)
    taken_again[inside] = ~starts_group[limit[inside]]

    rows_and_never = np.append(rows, count)
    never = np.where(taken_again, rows_and_never[limit], count)

    def first(kind: Action) -> Rows:
        position = _next(action == kind)[births]
        return np.where(position < limit, rows_and_never[position], count)

    requested, completed = first(Action.FREE_REQUESTED), first(Action.FREE_COMPLETED)
    has_completions = bool(np.any(tape.action == Action.FREE_COMPLETED))
    free_requested = np.minimum(np.where(requested < count, requested, completed), never)
    free_completed = completed if has_completions else requested
    free_completed = np.minimum(free_completed, never)
    order = np.argsort(rows[births], kind="stable")
    unplaced = np.flatnonzero(born_here & (tape.address < 0))
    if not len(unplaced):
        return Lifetimes(rows[births][order], free_requested[order], free_completed[order])
    # Empty tensors have no address: they take 0 bytes and live to the end.
    born = np.append(rows[births], unplaced)
    order = np.argsort(born, kind="stable")
    forever = np.full(len(unplaced), count)
    return Lifetimes(born[order], np.append(free_requested, forever)[order], np.append(free_completed, forever)[order])


def _next(here: NDArray[np.bool_]) -> Rows:
    """Return for each position the first true position after it, the length without one."""
    count = len(here)
    positions = np.where(here, np.arange(count), count)
    following = np.minimum.accumulate(positions[::-1])[::-1]
    return np.append(following[1:], count)[:count]


def free_rows(tape: Tape) -> Rows:
    """Return the row that frees each block: `len(tape)` for a block never freed, -1 in rows that allocate nothing.

    As in the allocated curve, a block is freed by its `free_requested` row.

    >>> from memexplore.tape import Meta, Source
    >>> tape = Tape.from_columns({"action": [Action.ALLOC, Action.ALLOC, Action.FREE_REQUESTED],
    ...                           "address": [0, 512, 0], "size": [10, 20, 10]}, meta=Meta(Source.MEASURED, "cpu"))
    >>> free_rows(tape).tolist()
    [2, 3, -1]

    Raises ValueError for a tape that is not placed.
    """
    life = lifetimes(tape)
    result = np.full(len(tape), -1, dtype=np.int64)
    result[life.born] = life.requested
    return result


def live_rows(tape: Tape, row: int | None = None) -> Rows:
    """Return the alloc rows of the blocks allocated after a row (default: the peak), in order of allocation.

    >>> from memexplore.tape import Meta, Source
    >>> tape = Tape.from_columns({"action": [Action.ALLOC, Action.ALLOC, Action.FREE_REQUESTED],
    ...                           "address": [0, 512, 0], "size": [10, 20, 10]}, meta=Meta(Source.MEASURED, "cpu"))
    >>> live_rows(tape, 1).tolist(), live_rows(tape, 2).tolist()
    ([0, 1], [1])

    Raises IndexError for a row outside the tape, ValueError for a tape that is not placed.
    """
    if row is None:
        row = peak(tape)[1]
    elif not 0 <= row < len(tape):
        raise IndexError(f"row {row} is outside this tape of {len(tape)} rows")
    life = lifetimes(tape)
    return life.born[(life.born <= row) & (life.requested > row)]


def changes(tape: Tape, curve: CurveName) -> Rows:
    """Return the change of a curve in each row, in bytes; the curve is the cumulative sum."""
    if curve == "reserved":
        grows, shrinks = np.isin(tape.action, GROWTH), np.isin(tape.action, _SHRINKING)
        if np.any(grows) or np.any(shrinks):
            return np.where(grows, tape.size, 0) - np.where(shrinks, tape.size, 0)
        curve = "active"
    if curve not in ("requested", "allocated", "active"):
        raise ValueError(f"unknown curve {curve!r}: use requested, allocated, active or reserved")
    life = lifetimes(tape)
    sizes = (tape.size if curve == "requested" else block_bytes(tape))[life.born]
    gone = life.requested if curve == "allocated" else life.completed
    result = np.zeros(len(tape) + 1, dtype=np.int64)
    result[life.born] = sizes
    # A row frees at most one block, so plain indexing suffices; the extra last row collects blocks never freed.
    result[gone] -= sizes
    return result[:-1]


def curve(tape: Tape, name: CurveName = "allocated") -> Rows:
    """Return the value of a curve after each row, in bytes.

    `allocated` falls at `free_requested` rows, `active` and `requested` at `free_completed` rows. `reserved` is the sum
    of the segments; for a tape without segment rows (a CPU has no caching allocator) it equals `active`.

    >>> from memexplore.tape import Meta, Source
    >>> tape = Tape.from_columns({"action": [Action.ALLOC, Action.ALLOC, Action.FREE_REQUESTED],
    ...                           "address": [0, 512, 0], "size": [10, 20, 10]}, meta=Meta(Source.MEASURED, "cpu"))
    >>> curve(tape, "allocated").tolist()
    [10, 30, 20]

    Raises ValueError for an unknown curve or a tape that is not placed.
    """
    return np.cumsum(changes(tape, name))


def peak(tape: Tape, curve: CurveName = "allocated") -> tuple[int, int]:
    """Return the highest value of a curve in bytes, and the first row that reaches it.

    >>> from memexplore.tape import Meta, Source
    >>> tape = Tape.from_columns({"action": [Action.ALLOC, Action.FREE_REQUESTED], "address": [0, 0], "size": [10, 10]},
    ...                          meta=Meta(Source.MEASURED, "cpu"))
    >>> peak(tape)
    (10, 0)

    For an empty tape the peak is 0 bytes at row -1. Raises ValueError as `curve` does.
    """
    values = np.cumsum(changes(tape, curve))
    if not len(values):
        return 0, -1
    row = int(np.argmax(values))
    return int(values[row]), row


def by_category(
    tape: Tape, curve: Literal["requested", "allocated", "active"] = "allocated", window: slice = slice(None)
) -> Rows:
    """Return the bytes of each category after each row: shape (len(Category), rows of the window).

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
    # Rows before the window are added to its first row, so the cost depends on the size of the window only.
    width = max(last - first, 0)
    result = np.zeros((len(Category), width), dtype=np.int64)
    if not width:
        return result
    for rows, signed in ((life.born, sizes), (gone, -sizes)):
        seen = rows < last
        np.add.at(result, (category[seen], np.maximum(rows[seen] - first, 0)), signed[seen])
    return np.cumsum(result, axis=1, out=result)


def category_bytes(tape: Tape, row: int) -> Rows:
    """Return the allocated bytes of each category after a row; zeros for row -1, the peak of an empty tape.

    >>> from memexplore.tape import Meta, Source
    >>> tape = Tape.from_columns({"address": [0, 512], "size": [10, 20], "category": [Category.INPUT, Category.BUFFER]},
    ...                          meta=Meta(Source.MEASURED, "cpu"))
    >>> int(category_bytes(tape, 1)[Category.INPUT]), int(category_bytes(tape, 1).sum())
    (10, 30)

    Raises ValueError for a tape that is not placed.
    """
    return by_category(tape, window=slice(row, row + 1))[:, 0] if row >= 0 else np.zeros(len(Category), np.int64)
