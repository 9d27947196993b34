"""Annotate the history of the real CUDA allocator with the ops and layers that a recorder saw in the same run."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
from numpy.typing import NDArray

from memexplore.analysis.curves import lifetimes
from memexplore.recorder.earlier_blocks import NOTHING_EARLIER, Earlier, classified
from memexplore.recorder.matching import Numbers, Unseen, matches, unseen
from memexplore.recorder.tape_builder import OWN
from memexplore.tape import COLUMNS, Action, Category, Frame, Phase, Tape

Rows = NDArray[np.int64]

_CONVOLUTION = re.compile(r"aten::.*convolution")
"""Ops for which cuDNN gets a workspace in the call of a plan: the last of the requests, freed before all others."""
_CUDNN = re.compile(r"aten::.*cudnn")
"""Other ops of cuDNN, which copy their arguments in front of the outputs and get a workspace behind them."""
_NEW_SEGMENT = (Action.SEGMENT_ALLOC, Action.SEGMENT_MAP)
_BLOCKS = (Action.ALLOC, Action.PREEXISTING)


def annotate(history: Tape, recorded: Tape, numbers: Numbers | None = None, earlier: Earlier = NOTHING_EARLIER) -> Tape:
    """Return the allocator's rows, each with op, layer, phase, step and category of the recorded row it belongs to.

    Both tapes are of one run: `history` has every request with its address, `recorded` the requests that became
    storages, with op and layer. A recorded block is a request of the history with its address and size. The other
    requests were made by kernels beside their outputs: they belong to the op that was running by the `numbers` in their
    stacks, without numbers to the op in front. A block that its op freed is a temporary, or a workspace where a library
    requested it; a block that stays is a workspace. A block that no op requested has the category that follows from its
    lifetime, if any, and of an older block that was not recorded what `earlier` says. A mark of the recorded tape comes
    in front of the requests that follow it.
    """
    match = matches(history, recorded, numbers)
    others = unseen(history, recorded, match, numbers)
    columns: dict[str, Any] = {name: getattr(history, name).copy() for name in COLUMNS}
    stacks = _without_own_frames(history, columns)
    for name in ("op", "module", "tensor", "workspace"):
        columns[name][:] = -1
    columns["category"][:] = Category.UNKNOWN
    columns["stack"][~np.isin(history.action, (*_BLOCKS, Action.OOM))] = -1
    rows = np.flatnonzero((match >= 0) & (recorded.action != Action.FREE_REQUESTED))
    _set_phases(columns, recorded, rows, match[rows])
    for name in ("category", "tensor"):
        columns[name][match[rows]] = getattr(recorded, name)[rows]
    of_op = others.belongs_to >= 0
    source = np.append(rows, others.belongs_to[of_op])
    target = np.append(match[rows], others.rows[of_op])
    for name in ("op", "module"):
        columns[name][target] = getattr(recorded, name)[source]
    has_stack = recorded.stack[source] >= 0
    columns["stack"][target[has_stack]] = recorded.stack[source[has_stack]] + len(stacks)
    stacks += recorded.stacks
    for at, quiet in others.quiet.items():
        row = others.rows[at]
        columns["op"][row], columns["module"][row] = quiet.op, quiet.module
        if quiet.stack:
            columns["stack"][row] = len(stacks)
            stacks.append(quiet.stack)
    of_op[list(others.quiet)] = True
    tape, moved = _with_marks(recorded.with_rows(columns, stacks=stacks), recorded, match, others)
    is_known = np.zeros(len(history), dtype=bool)
    is_known[match[rows]] = True
    older = np.flatnonzero((history.action == Action.PREEXISTING) & ~is_known)
    # Only the larger size, that of cuBLAS: a temporary may well have the 1 MiB of cuBLASLt.
    tape = _with_categories(
        tape, others._replace(rows=moved[others.rows]), of_op, max(earlier.workspace_sizes, default=-1)
    )
    return _with_frees(classified(tape, moved[older], earlier))


def _without_own_frames(history: Tape, columns: dict[str, Any]) -> list[tuple[Frame, ...]]:
    """Return the stacks of a history without frames of memexplore, and number the rows by them."""
    table: dict[tuple[Frame, ...], int] = {}
    shown = [tuple(frame for frame in stack if not frame.filename.startswith(OWN)) for stack in history.stacks]
    index = np.array([*(table.setdefault(stack, len(table)) if stack else -1 for stack in shown), -1], dtype=np.int32)
    columns["stack"] = index[columns["stack"]]
    return list(table)


def _set_phases(columns: dict[str, Any], recorded: Tape, rows: Rows, match: Rows) -> None:
    """Set phase and step of the recorded rows, and of the rows behind each of them."""
    position = np.full(len(columns["action"]), -1, dtype=np.int64)
    position[match] = match
    last = np.maximum.accumulate(position)
    for name, before in (("phase", Phase.OTHER), ("step", 0)):
        column = columns[name]
        column[:] = before
        column[match] = getattr(recorded, name)[rows]
        columns[name] = np.where(last >= 0, column[last], before).astype(column.dtype)


def _with_marks(tape: Tape, recorded: Tape, match: Rows, others: Unseen) -> tuple[Tape, Rows]:
    """Return the tape with the marks of the recorded one, and the new number of each row."""
    marks = np.flatnonzero(recorded.action == Action.MARK)
    if not len(marks):
        return tape, np.arange(len(tape))
    following = np.append(np.where(match >= 0, match, len(tape)), len(tape))
    of_op = others.belongs_to >= 0
    np.minimum.at(following, others.belongs_to[of_op], others.rows[of_op])
    # The outputs of an op may be recorded in another order than they were made.
    at = np.minimum.accumulate(following[::-1])[::-1][marks]
    is_new = np.append(np.isin(tape.action, _NEW_SEGMENT), False)
    # The segments that the allocator got for a request belong to it.
    request = np.append(np.isin(tape.action, (Action.ALLOC, Action.OOM)), False)
    first = np.arange(len(tape) + 1) - _run_lengths(is_new)
    at = np.where(request[at], first[at], at)
    columns: dict[str, Any] = {}
    for name in COLUMNS:
        columns[name] = np.insert(getattr(tape, name), at, getattr(recorded, name)[marks])
    is_mark = np.insert(np.zeros(len(tape), dtype=bool), at, True)
    columns["stack"][is_mark] = -1
    # The two tapes have different clocks: a mark has the time of the row behind it.
    columns["time"][is_mark] = np.append(tape.time, tape.time[-1:] if len(tape) else 0)[at]
    # A phase lasts until the next mark, whatever phase the rows were matched to.
    last_mark = np.maximum.accumulate(np.where(is_mark, np.arange(len(is_mark)), -1))
    inside = last_mark >= 0
    for name in ("phase", "step"):
        columns[name][inside] = columns[name][last_mark[inside]]
    return tape.with_rows(columns), np.flatnonzero(~is_mark)


def _run_lengths(flags: NDArray[np.bool_]) -> Rows:
    """Return for each position the number of flags that are set directly in front of it.

    >>> _run_lengths(np.array([True, True, False, False])).tolist()
    [0, 1, 2, 0]
    """
    position = np.arange(len(flags))
    last_unset = np.maximum.accumulate(np.where(~flags, position, -1))
    before = np.append(-1, last_unset[:-1])
    return position - 1 - before


def _with_categories(tape: Tape, others: Unseen, of_op: NDArray[np.bool_], workspace_size: int) -> Tape:
    """Return the tape with the categories of the requests that were not recorded."""
    life = lifetimes(tape)
    category = tape.category.copy()
    rows = others.rows
    convolution, cudnn = (
        np.array([*(pattern.match(op) is not None for op in tape.ops), False], dtype=bool)[tape.op[rows]]
        for pattern in (_CONVOLUTION, _CUDNN)
    )
    following = np.minimum(rows + 1, len(tape) - 1)
    at_once = (tape.action[following] == Action.FREE_REQUESTED) & (tape.address[following] == tape.address[rows])
    is_workspace = ~others.is_scratch | (convolution & at_once) | (cudnn & ~convolution & others.follows_output)
    is_workspace |= tape.size[rows] == workspace_size
    category[rows] = np.where(is_workspace, Category.WORKSPACE, Category.TEMPORARY)
    freed = np.full(len(tape), len(tape), dtype=np.int64)
    freed[life.born] = life.requested
    category[rows[~of_op]] = _by_lifetime(tape, rows[~of_op], freed[rows[~of_op]])
    category.flags.writeable = False
    return tape.replace(category=category)


def _with_frees(tape: Tape) -> Tape:
    """Return the tape with the category of its block for each free."""
    life = lifetimes(tape)
    # The extra last row absorbs blocks that are never freed.
    column = np.append(tape.category, Category.UNKNOWN)
    for ends in (life.requested, life.completed):
        column[ends] = tape.category[life.born]
    category = column[:-1]
    category.flags.writeable = False
    return tape.replace(category=category)


def _by_lifetime(tape: Tape, rows: Rows, freed: Rows) -> NDArray[np.uint8]:
    """Return the categories of blocks of no op, such as those that compiled code requests."""
    phase, step = np.append(tape.phase, Phase.OTHER), np.append(tape.step, -1)
    result = np.full(len(rows), Category.UNKNOWN, dtype=np.uint8)
    result[(phase[freed] == phase[rows]) & (step[freed] == step[rows])] = Category.TEMPORARY
    result[(phase[rows] == Phase.FORWARD) & (phase[freed] == Phase.BACKWARD)] = Category.ACTIVATION
    return result
