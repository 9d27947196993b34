"""The rows of a tape as blocks, and back: an allocation and its frees are one row of a table instead of three.

A *block* is the allocation in a row, freed so many rows later, at a *place* (an address). What its row says besides is
a *kind*, which many rows share; what its frees say is a *free*, likewise. Rows that belong to no block, such as
segments and marks, are *events*. docs/tape.md specifies the columns.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from memexplore.tape.columns import Numbers
from memexplore.tape.tape import COLUMNS, Action, Tape

_BIRTHS = (Action.ALLOC, Action.PREEXISTING)
_FREES = (Action.FREE_REQUESTED, Action.FREE_COMPLETED)
_FACTS = ("size", "stream", "category", "op", "module", "stack", "tensor", "workspace")
"""What a row says besides what happens, when and where."""
_OF_BLOCK = ("size", "stream", "category")
"""Facts of a free that are written as the difference to those of its block, which is 0 in most tapes."""

AS_DIFFERENCES = ("time", "period.row", "period.step", "block.born", "event.row", "place.address")
"""Columns whose neighbours are close."""
ROW_COLUMNS = (
    *("time", "period.row", "period.step", "period.phase", "place.address"),
    *("block.born", "block.life", "block.late", "block.kind", "block.free", "block.place"),
    *("event.row", "event.kind", "event.place"),
    *("kind.action", *(f"kind.{name}" for name in _FACTS)),
    *(f"free.{name}" for name in _FACTS),
)
"""The columns that the rows of a tape are made from; none is longer than the tape."""
LATER_COLUMNS = ("kind.workspace", "free.workspace")
"""Columns that a tape without workspaces does not write, and that files of earlier releases lack."""


def to_blocks(tape: Tape, block_bytes: Numbers) -> dict[str, Numbers]:
    """Return the columns of a file for the rows of a tape; `block_bytes` has the size of the block of each row."""
    facts = {name: getattr(tape, name).astype(np.int64) for name in _FACTS}
    born = np.flatnonzero(_is_any(tape.action, _BIRTHS))
    requested, completed = (rows[born] for rows in _frees(tape, facts))
    life = np.where(requested >= 0, requested - born, 0)
    late = np.where(completed >= 0, completed - born - life, 0)

    is_event = np.ones(len(tape), dtype=bool)
    for rows in (born, requested[life > 0], completed[late > 0]):
        is_event[rows] = False
    event = np.flatnonzero(is_event)

    told = np.concatenate([born, event])
    kind, examples = _distinct([tape.action[told], block_bytes[told], *(facts[name][told] for name in _FACTS)])
    examples = told[examples]
    addresses, place = np.unique(tape.address[told], return_inverse=True)
    has_none = len(addresses) > 0 and addresses[0] == -1
    place, addresses = (place, addresses[1:]) if has_none else (place + 1, addresses)

    freed = np.flatnonzero((life > 0) | (late > 0))
    free_row = np.where(life > 0, requested, completed)[freed]
    free_facts = {
        name: facts[name][free_row] - (facts[name][born[freed]] if name in _OF_BLOCK else 0) for name in _FACTS
    }
    free, free_examples = _distinct(list(free_facts.values()))
    free_of_block = np.zeros(len(born), dtype=np.int64)
    free_of_block[freed] = free + 1

    period = np.flatnonzero(_changes(tape.step) | _changes(tape.phase))
    blocks = len(born)
    columns = {
        "time": tape.time,
        "period.row": period,
        "period.step": tape.step[period],
        "period.phase": tape.phase[period],
        "place.address": addresses,
        "block.born": born,
        "block.life": life,
        "block.late": late,
        "block.kind": kind[:blocks],
        "block.free": free_of_block,
        "block.place": place[:blocks],
        "event.row": event,
        "event.kind": kind[blocks:],
        "event.place": place[blocks:],
        "kind.action": tape.action[examples],
        "kind.block": block_bytes[examples],
        **{f"kind.{name}": facts[name][examples] for name in _FACTS},
        **{f"free.{name}": values[free_examples] for name, values in free_facts.items()},
    }
    return {name: values for name, values in columns.items() if tape.workspaces or name not in LATER_COLUMNS}


def to_rows(columns: Mapping[str, Numbers], rows: int, lengths: Mapping[str, int]) -> dict[str, NDArray[Any]]:
    """Return the columns of a tape of so many rows from those of a file; `lengths` are those of the tape's tables.

    Raises ValueError where the columns contradict each other, or hold a number that no tape has.
    """
    without = {"kind.workspace": np.full_like(columns["kind.op"], -1)}
    without["free.workspace"] = np.full_like(columns["free.op"], -1)
    columns = without | dict(columns)
    _check_numbers(columns, rows, lengths)
    born, life, late = columns["block.born"], columns["block.life"], columns["block.late"]
    is_requested, is_completed = life > 0, late > 0
    parts = born, (born + life)[is_requested], (born + life + late)[is_completed], columns["event.row"]
    _check_order(np.concatenate(parts), columns["period.row"], rows)

    def in_order(births: Any, requests: Any, completions: Any, events: Any) -> Numbers:
        values = np.empty(rows, dtype=np.int64)
        for rows_of_part, part in zip(parts, (births, requests, completions, events), strict=True):
            values[rows_of_part] = part
        return values

    def column(name: str) -> Numbers:
        if name == "time":
            return columns[name]
        if name in ("step", "phase"):
            return np.repeat(columns[f"period.{name}"], np.diff(columns["period.row"], append=rows))
        if name == "address":
            addresses = np.append(-1, columns["place.address"])
            births = addresses[columns["block.place"]]
            return in_order(births, births[is_requested], births[is_completed], addresses[columns["event.place"]])
        births, events = (columns[f"kind.{name}"][columns[f"{table}.kind"]] for table in ("block", "event"))
        if name == "action":
            return in_order(births, Action.FREE_REQUESTED, Action.FREE_COMPLETED, events)
        frees = np.append(0, columns[f"free.{name}"])[columns["block.free"]]
        if name in _OF_BLOCK:
            frees = frees + births
        return in_order(births, frees[is_requested], frees[is_completed], events)

    return {name: _narrow(name, column(name)) for name in COLUMNS}


def _check_numbers(columns: Mapping[str, Numbers], rows: int, lengths: Mapping[str, int]) -> None:
    """Raise ValueError for columns of different lengths, and for numbers outside the tables to which they point."""
    for table in ("period", "block", "event", "kind", "free"):
        if len({len(values) for name, values in columns.items() if name.startswith(f"{table}.")}) > 1:
            raise ValueError(f"the columns of each {table} have different lengths")
    if len(columns["time"]) != rows:
        raise ValueError("column 'time' has another length than the tape")
    kinds, frees, places = (len(columns[name]) for name in ("kind.action", "free.op", "place.address"))
    ends = {"block.born": rows, "block.life": rows, "block.late": rows, "block.free": frees + 1}
    ends |= {f"{table}.kind": kinds for table in ("block", "event")}
    ends |= {f"{table}.place": places + 1 for table in ("block", "event")}
    for name, end in (ends | {"kind.action": len(Action)}).items():
        _check(name, columns[name], 0, end)
    for name, end in lengths.items():
        for table in ("kind", "free"):
            _check(f"{table}.{name}", columns[f"{table}.{name}"], -1, end)
    if np.any((columns["block.free"] > 0) != (columns["block.life"] + columns["block.late"] > 0)):
        raise ValueError("a block that is freed says nothing about its free, or one that is not does")


def _check_order(position: Numbers, period: Numbers, rows: int) -> None:
    """Raise ValueError if the rows of blocks and events are not just those of the tape, or its periods do not rise."""
    is_inside = len(position) == rows and (not rows or 0 <= position.min() <= position.max() < rows)
    if not is_inside or np.any(np.bincount(position, minlength=rows) != 1):
        raise ValueError("its blocks and events are not the rows that it declares")
    ends = np.append(period, rows)
    if rows and (ends[0] != 0 or np.any(np.diff(ends) <= 0)):
        raise ValueError("its periods are not in order")


def _frees(tape: Tape, facts: Mapping[str, Numbers]) -> tuple[Numbers, Numbers]:
    """Return for each row that allocates the rows in which its block is freed and reusable, -1 for none.

    The frees of a block are the next rows of its address, where these are frees that say the same.
    """
    requested, completed = np.full(len(tape), -1), np.full(len(tape), -1)
    rows = np.flatnonzero((tape.address >= 0) & _is_any(tape.action, (*_BIRTHS, *_FREES)))
    rows = rows[np.argsort(tape.address[rows], kind="stable")]
    # A row beyond the end belongs to no address.
    address, action = (np.append(values[rows], [-1, -1]) for values in (tape.address, tape.action.astype(np.int64)))
    rows = np.append(rows, [-1, -1])
    is_birth = _is_any(action[:-2], _BIRTHS)
    is_next = address[1:] == address[:-1]
    is_requested = is_birth & is_next[:-1] & (action[1:-1] == Action.FREE_REQUESTED)
    at = np.flatnonzero(is_requested)
    requested[rows[at]] = rows[at + 1]
    # The row after the request, or after the birth where no request is recorded.
    at = np.flatnonzero(is_birth)
    before = at + is_requested[at]
    is_completed = is_next[before] & (action[before + 1] == Action.FREE_COMPLETED)
    at, before = at[is_completed], before[is_completed]
    same = np.ones(len(at), dtype=bool)
    for values in facts.values():
        same &= (values[rows[before]] == values[rows[before + 1]]) | (before == at)
    completed[rows[at[same]]] = rows[before[same] + 1]
    return requested, completed


def _is_any(action: NDArray[np.integer], kinds: Sequence[Action]) -> NDArray[np.bool_]:
    """Return whether each action is one of some kinds; `numpy.isin` takes ten times as long."""
    return np.logical_or.reduce([action == kind for kind in kinds])


def _distinct(columns: Sequence[NDArray[Any]]) -> tuple[Numbers, Numbers]:
    """Return the number of the kind of each row of some columns, and the first row of each kind.

    Kinds are numbered in the order of their first row, so that neighbours have close numbers.
    """
    key, values = np.zeros(len(columns[0]), dtype=np.int64), 1
    for column in columns:
        codes = column.astype(np.int64)
        lowest, highest = (int(codes.min()), int(codes.max())) if len(codes) else (0, 0)
        count = highest - lowest + 1
        if count < 1 << 21:
            codes -= lowest
        else:
            table, codes = np.unique(codes, return_inverse=True)
            count = len(table)
        if values * count >= 1 << 62:
            table, key = np.unique(key, return_inverse=True)
            values = len(table)
        key, values = key * count + codes, values * count
    _, first, kind = np.unique(key, return_index=True, return_inverse=True)
    order = np.argsort(first)
    rank = np.empty_like(order)
    rank[order] = np.arange(len(order))
    return rank[kind], first[order]


def _changes(values: NDArray[Any]) -> NDArray[np.bool_]:
    """Return whether each number differs from the one before; the first one does."""
    changes = np.ones(len(values), dtype=bool)
    changes[1:] = values[1:] != values[:-1]
    return changes


def _check(name: str, values: Numbers, lowest: int, end: int) -> None:
    if len(values) and not lowest <= values.min() <= values.max() < end:
        raise ValueError(f"column {name!r} has a number outside its table")


def _narrow(name: str, values: Numbers) -> NDArray[Any]:
    """Return numbers in the type of their column."""
    limits = np.iinfo(COLUMNS[name])
    if len(values) and not limits.min <= values.min() <= values.max() <= limits.max:
        raise ValueError(f"column {name!r} has a value that no tape has")
    return values.astype(COLUMNS[name])
