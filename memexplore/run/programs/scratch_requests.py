"""Exchange the scratch requests of an earlier trace for those of another batch size.

A scratch request is a block without a tensor that an op takes and frees again, for some batch sizes only, such as a sum
that is split from some size on. The new run's first step shows which scratch memory its ops take; both steps of the
earlier trace get it. What an op takes depends on its arguments, so an op of the second step takes what the same op of
the first step takes.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from memexplore.run.programs.trace_reuse import ACTION, BLOCK, CODE, MODULE, PHASE, FirstStep, Trace
from memexplore.tape import COLUMNS, Action, Category, Phase


class _Group(NamedTuple):
    """Rows of a first step in which one op takes scratch memory and frees it."""

    start: int
    stop: int
    before: int
    """Number of the rows of no group in front of it."""
    anchor: int
    """The request of the same op beside it, as a number among the rows of no group."""


def with_scratch_of(trace: Trace, begun: FirstStep, end: int) -> Trace | None:
    """Return a trace with the scratch requests of another first step; None if the steps differ in more than these.

    `begun` is the other step up to the row that has the number `end` in the first step of the trace. Sizes and shapes
    of all other requests are as in the trace.
    """
    before = trace.first
    old = _scratch_rows(before)
    old[end:] = False
    new = _scratch_rows(begun)
    core, core_of_begun = np.flatnonzero(~old[:end]), np.flatnonzero(~new)
    if not np.array_equal(_numbered(before.compared, core), _numbered(begun.compared, core_of_begun)):
        return None
    groups = _groups(begun, new, core_of_begun)
    if groups is None:
        return None
    # Row of the earlier first step -> row of the new one, -1 for its scratch requests.
    count, later = len(begun.size), len(before.size) - end
    moved = np.full(len(before.size), -1)
    moved[core], moved[end:] = core_of_begun, np.arange(count, count + later)
    places = _places(trace, [*core.tolist(), end], groups)
    if places is None:
        return None
    update = None if trace.update is None else trace.update._replace(row=int(moved[trace.update.row]))
    result = _with_rows(trace, begun, old, moved, places)
    return dataclasses.replace(result, first=_first_step(before, begun, moved, end), update=update)


def _scratch_rows(first: FirstStep) -> NDArray[np.bool_]:
    """Return which rows are scratch requests of forward and backward, or free them, beside other rows of their op."""
    table = first.compared
    action, phase = table[:, ACTION], table[:, PHASE]
    frees = np.flatnonzero((action == Action.FREE_REQUESTED) & (table[:, BLOCK] >= 0))
    freed_at = np.full(len(table), -1)
    freed_at[table[frees, BLOCK]] = frees
    without_tensor = (action == Action.ALLOC) & (first.tensor == "") & np.isin(phase, (Phase.FORWARD, Phase.BACKWARD))
    # Whether an op has a workspace may depend on the memory that is left.
    without_tensor &= (freed_at >= 0) & (first.category != Category.WORKSPACE)
    result = np.zeros(len(table), dtype=bool)
    for row in np.flatnonzero(without_tensor).tolist():
        end = int(freed_at[row])
        between = np.arange(row, end)
        is_free = action[between] == Action.FREE_REQUESTED
        requests = np.where(is_free, table[between, BLOCK], between)
        of_op = (
            (requests >= 0)
            & (action[requests] == Action.ALLOC)
            & (table[requests][:, CODE] == table[row, CODE]).all(axis=1)
        )
        if (of_op & (~is_free | without_tensor[requests])).all():
            result[[row, end]] = True
    return result


def _numbered(compared: NDArray[np.int64], rows: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return some rows, with the blocks of frees as numbers among these rows."""
    number = np.full(len(compared) + 1, -1)
    number[rows] = np.arange(len(rows))
    table = compared[rows].copy()
    frees = table[:, ACTION] == Action.FREE_REQUESTED
    table[frees, BLOCK] = number[table[frees, BLOCK]]
    return table


def _groups(begun: FirstStep, scratch: NDArray[np.bool_], core: NDArray[np.int64]) -> list[_Group] | None:
    """Return the groups of scratch requests; None if there is no request of a tensor by the same op beside one."""
    edges = np.flatnonzero(np.diff(np.concatenate(([False], scratch, [False]))))
    groups = []
    for start, stop in edges.reshape(-1, 2).tolist():
        before = int(np.searchsorted(core, start))
        codes = {tuple(begun.compared[_request(begun, row), CODE].tolist()) for row in range(start, stop)}
        if len(codes) > 1:
            return None
        (code,) = codes
        for anchor in (before - 1, before):
            if not 0 <= anchor < len(core):
                continue
            row = begun.compared[core[anchor]]
            if row[ACTION] == Action.ALLOC and tuple(row[CODE].tolist()) == code:
                groups.append(_Group(start, stop, before, anchor))
                break
        else:
            return None
    return groups


def _request(first: FirstStep, row: int) -> int:
    """Return the request of a row: the row itself, or for a free the request of its block."""
    entry = first.compared[row]
    return row if entry[ACTION] == Action.ALLOC else int(entry[BLOCK])


def _first_step(before: FirstStep, begun: FirstStep, moved: NDArray[np.int64], end: int) -> FirstStep:
    """Return `begun` with the sizes and shapes of `before`, and its rows from `end` on."""
    tail = before.compared[end:].copy()
    frees = (tail[:, ACTION] == Action.FREE_REQUESTED) & (tail[:, BLOCK] >= 0)
    tail[frees, BLOCK] = moved[tail[frees, BLOCK]]
    kept = moved >= 0
    columns = {}
    for name in ("size", "in_optimizer", "tensor", "workspace", "category"):
        values = np.append(getattr(begun, name), getattr(before, name)[end:])
        values[moved[kept]] = getattr(before, name)[kept]
        columns[name] = values
    return FirstStep(np.concatenate((begun.compared, tail)), **columns)


class _Place(NamedTuple):
    """Where the rows of a group are inserted: in front of a row of a tape."""

    at: int
    beside: int
    """The row of the request of the same op, which has its op, stack, phase and step."""
    group: _Group


def _places(trace: Trace, core: list[int], groups: list[_Group]) -> list[_Place] | None:
    """Return the places of the groups in both steps; None if the second step does not have each op once.

    `core` are the rows of no group in the first step, and the row that follows them.
    """
    tape, source = trace.tape, trace.size_source
    starts = np.flatnonzero(tape.action != Action.FREE_COMPLETED)  # a free is one event and two rows
    starts = np.append(starts, len(tape))
    later = np.arange(len(tape)) >= starts[len(trace.first.size)]
    image_of: dict[int, list[int]] = {}
    for row in np.flatnonzero(later & (tape.action == Action.ALLOC) & (source >= 0)).tolist():
        image_of.setdefault(int(source[row]), []).append(row)
    places = []
    for group in groups:
        anchor = core[group.anchor]
        images = image_of.get(anchor, [])
        if len(images) != 1:
            return None
        places.append(_Place(int(starts[core[group.before]]), int(starts[anchor]), group))
        places.append(_Place(images[0] + (group.anchor < group.before), images[0], group))
    return sorted(places)


class _Row(NamedTuple):
    """One inserted row; its other columns are as in the row beside it."""

    beside: int
    source: int
    """The request in the first step that has its size."""
    action: int
    address: int
    size: int
    category: int
    phase: int
    op: int
    module: int
    stack: int
    tensor: int = -1
    workspace: int = -1


def _rows(begun: FirstStep, place: _Place, stack: int, addresses: int) -> Iterator[_Row]:
    """Return the rows of a group; `stack` is its number on the tape, addresses from `addresses` on are not used."""
    for row in range(place.group.start, place.group.stop):
        entry = begun.compared[row]
        request = _request(begun, row)
        op, _, _ = begun.compared[request, CODE].tolist()
        category = int(begun.category[request])
        block = _Row(
            beside=place.beside,
            source=request,
            action=Action.ALLOC,
            address=addresses + request,
            size=int(begun.size[request]),
            category=Category.TEMPORARY if category == Category.UNKNOWN else category,
            phase=int(entry[PHASE]),
            op=op,
            module=int(entry[MODULE]),
            stack=stack,
        )
        if request == row:
            yield block
        else:
            freed = block._replace(op=-1, module=-1, stack=-1)
            yield freed._replace(action=Action.FREE_REQUESTED)
            yield freed._replace(action=Action.FREE_COMPLETED)


def _with_rows(
    trace: Trace, begun: FirstStep, old: NDArray[np.bool_], moved: NDArray[np.int64], places: list[_Place]
) -> Trace:
    """Return the trace with the scratch requests of the groups in place of its own."""
    tape, source, shape = trace.tape, trace.size_source, trace.tensor_source
    count = len(old)
    rows: list[_Row] = []
    at: list[int] = []
    unused = int(tape.address.max(initial=0)) + 1
    for place in places:
        # A group may free what another one has requested, in the same step.
        addresses = unused + int(tape.step[place.beside]) * len(begun.size)
        new = list(_rows(begun, place, int(tape.stack[place.beside]), addresses))
        rows += new
        at += [place.at] * len(new)
    taken = np.insert(np.arange(len(tape)), at, [row.beside for row in rows])
    is_new = np.insert(np.zeros(len(tape), dtype=bool), at, True)
    is_kept = is_new | ~((source >= 0) & old[source])[taken]
    taken, is_new = taken[is_kept], is_new[is_kept]
    columns = {name: getattr(tape, name)[taken] for name in COLUMNS}
    for name in set(_Row._fields) & set(columns):
        columns[name][is_new] = [getattr(row, name) for row in rows]
    new_source = np.where(source >= 0, moved[source], -1)[taken]
    new_source[is_new] = [row.source for row in rows]
    # Beyond the rows of the first step: the shape is unknown.
    rows_of_first = np.append(moved, len(begun.size) + count - int(np.count_nonzero(~old)))
    new_shape = np.where(shape >= 0, rows_of_first[shape], -1)[taken]
    new_shape[is_new] = -1
    return dataclasses.replace(trace, tape=tape.with_rows(columns), size_source=new_source, tensor_source=new_shape)
