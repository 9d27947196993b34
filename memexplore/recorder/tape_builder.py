"""Build the Tape of a recorder's rows, with categories decided."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any, TypeVar

import numpy as np

from memexplore.recorder import categories
from memexplore.recorder.events import Event, Origin
from memexplore.recorder.recorder import Recorder
from memexplore.tape import Action, Category, Frame, Meta, Tape
from memexplore.text.tensor_text import interned
from memexplore.text.units import size_text

_FIELD = {name: column for column, name in enumerate(Event._fields)}
_OF_ONE = {Category.GATHERED_PARAMETER: Category.PARAMETER, Category.GRADIENT_BUCKET: Category.GRADIENT}
"""Categories of several tensors, and of copies of one of them."""
OWN = (os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep,)
"""Folder of files whose frames are no part of a stack."""
_Value = TypeVar("_Value")


def build(recorder: Recorder, meta: Meta, own: tuple[str, ...] = OWN) -> Tape:
    """Return the Tape of a recorder's rows; a free becomes two rows, requested and completed.

    Frames of files whose path begins with one of `own` are no part of its stacks.
    """
    table = _in_order(recorder)
    field = {name: table[:, column] for name, column in _FIELD.items()}
    action = field["action"]
    is_block = (action == Action.ALLOC) | (action == Action.PREEXISTING)
    is_free = action == Action.FREE_REQUESTED
    category, module = _categories_and_modules(recorder, field, is_block, is_free)

    kept = _kept_note(field["size"][sorted(recorder.kept)])
    stacks, stack_of = _stacks(recorder, own)
    stack = field["stack"].copy()
    stack[stack >= 0] = stack_of[stack[stack >= 0]]
    tensor, tensor_texts = _indexed(recorder.tensors, len(table))
    workspace, workspaces = _indexed(recorder.workspaces, len(table))
    stream = np.zeros(len(table), dtype=np.int64)
    stream[list(recorder.streams)] = list(recorder.streams.values())

    # A free has the row of its block as `call` and repeats its category, so that a tape can be cut anywhere.
    block = np.where(is_free, field["call"], -1)
    category[is_free] = np.where(block[is_free] >= 0, category[block[is_free]], Category.UNKNOWN)
    stream[is_free] = np.where(block[is_free] >= 0, stream[block[is_free]], 0)
    rows = np.repeat(np.arange(len(table)), np.where(is_free, 2, 1))
    second = np.zeros(len(rows), dtype=bool)
    second[1:] = (rows[1:] == rows[:-1]) & is_free[rows[1:]]
    actions = action[rows].copy()
    actions[second] = Action.FREE_COMPLETED
    return Tape.from_columns(
        {
            "time": field["time"][rows],
            "action": actions,
            "address": field["address"][rows],
            "size": field["size"][rows],
            "category": category[rows],
            "phase": field["phase"][rows],
            "step": field["step"][rows],
            "op": field["op"][rows],
            "module": module[rows],
            "stack": stack[rows],
            "tensor": tensor[rows],
            "workspace": workspace[rows],
            "stream": stream[rows],
        },
        meta=recorder.communication.meta(meta._replace(notes=(*meta.notes, *recorder.tags.sharing_notes(), *kept))),
        ops=list(recorder.ops),
        modules=list(recorder.names.table),
        stacks=stacks,
        classes=list(recorder.names.classes),
        tensor_texts=tensor_texts,
        workspaces=workspaces,
    )


def _in_order(recorder: Recorder) -> Any:
    """The events as one array, preexisting blocks first: some are recorded only when they are first used."""
    table = np.array(recorder.events, dtype=np.int64).reshape(len(recorder.events), len(_FIELD))
    action = table[:, _FIELD["action"]]
    preexisting = action == Action.PREEXISTING
    # Preexisting segments stay in front of their blocks, as in a tape from a file: they give the ends of the blocks.
    first = preexisting | np.logical_and.accumulate((action == Action.SEGMENT_ALLOC) | (action == Action.SEGMENT_MAP))
    if first[: int(first.sum())].all():
        return table
    order = np.argsort(~first, kind="stable")
    new_row = np.empty(len(order), dtype=np.int64)
    new_row[order] = np.arange(len(order))
    is_free = action == Action.FREE_REQUESTED
    block = table[:, _FIELD["call"]]
    block[is_free & (block >= 0)] = new_row[block[is_free & (block >= 0)]]
    table[preexisting, _FIELD["time"]] = 0
    rows = np.append(new_row, (len(order), -1)).tolist()  # the number of events stays, and -1, which is no row
    for table_of_rows in (recorder.tags, recorder.communication, recorder.copies):
        table_of_rows.renumber(rows.__getitem__)
    recorder.tensors = {int(new_row[row]): text for row, text in recorder.tensors.items()}
    recorder.workspaces = {int(new_row[row]): sizes for row, sizes in recorder.workspaces.items()}
    recorder.streams = {int(new_row[row]): stream for row, stream in recorder.streams.items()}
    recorder.kept = {int(new_row[row]) for row in recorder.kept}
    shift = np.append(np.cumsum(preexisting[::-1])[::-1], 0)
    # The end of a call is a number of events; preexisting blocks recorded later have moved in front of it.
    recorder.call_ends_at = [end if end < 0 else end + int(shift[end]) for end in recorder.call_ends_at]
    late = recorder.late
    late.ends = {int(new_row[event]): end if end is None else end + int(shift[end]) for event, end in late.ends.items()}
    recorder.open_rows.update({address: int(new_row[row]) for address, row in recorder.open_rows.items()})
    recorder.events = [tuple(event) for event in table[order].tolist()]
    return table[order]


def _categories_and_modules(recorder: Recorder, field: dict[str, Any], is_block: Any, is_free: Any) -> tuple[Any, Any]:
    """Category and module of every event."""
    count = len(is_block)
    certain = field["category"].copy()
    module = field["module"].copy()
    for row, tag in recorder.tags.categories.items():
        if 0 <= row < count and (certain[row] == Category.UNKNOWN or tag != Category.INPUT):
            certain[row] = tag
    for row, owner in recorder.tags.owners.items():
        if 0 <= row < count:
            module[row] = owner
    kinds = {
        row: Category(int(certain[row])) for row in np.flatnonzero(is_block & (certain != Category.UNKNOWN)).tolist()
    }
    copied = np.full(count, Category.UNKNOWN, dtype=np.int64)
    inherited = recorder.copies.inherited(
        {row: _OF_ONE.get(kind, kind) for row, kind in kinds.items() if kind != Category.INPUT}
    )
    for row, (kind, _) in inherited.items():
        copied[row] = kind
    dies = np.full(count, count, dtype=np.int64)
    freed = field["call"][is_free]
    recorded = freed >= 0
    dies[freed[recorded]] = np.flatnonzero(is_free)[recorded]
    ends = np.array([*recorder.call_ends_at, -1], dtype=np.int64)
    ends[:-1][ends[:-1] < 0] = count
    call = np.where(is_block, field["call"], -1)
    marks = np.flatnonzero(field["action"] == Action.MARK)
    # Calls of models one after the other are one forward pass.
    begun = np.stack([field["step"][marks], field["phase"][marks]])
    marks = marks[np.append(True, np.any(np.diff(begun) != 0, axis=0))[: len(marks)]]
    rows = np.flatnonzero(is_block)
    category = np.full(count, Category.UNKNOWN, dtype=np.uint8)
    category[rows] = categories.decide(
        field["phase"][rows],
        field["grad"][rows],
        certain[rows],
        copied[rows],
        rows,
        dies[rows],
        ends[call[rows]],
        marks,
        field["phase"][marks],
    )
    of_gradients = [row for row, (kind, _) in inherited.items() if kind == Category.GRADIENT]
    recorder.communication.decide(category, kinds, of_gradients, field["op"], recorder.ops)
    recorder.kept = {
        row for row in recorder.kept if category[row] == Category.INPUT and row not in recorder.tags.categories
    }
    category[list(recorder.kept)] = Category.UNKNOWN
    # A copy belongs to the layer of its source, which may be a copy as well.
    for row in sorted(inherited):
        kind, source = inherited[row]
        if category[row] == kind and row not in recorder.tags.owners:
            module[row] = module[source]
    return category, module


def _kept_note(sizes: Any) -> tuple[str, ...]:
    """Return a sentence on the blocks that earlier steps of a watched run left, given their sizes; none without one.

    >>> _kept_note(np.array([512, 512]))
    ('2 blocks (1.00 KiB) were kept from earlier steps: this tape has neither their layer nor their line.',)
    """
    if not len(sizes):
        return ()
    blocks = "1 block" if len(sizes) == 1 else f"{len(sizes):,} blocks"
    were, their = ("was", "its") if len(sizes) == 1 else ("were", "their")
    place = f"neither {their} layer nor {their} line"
    return (f"{blocks} ({size_text(int(sizes.sum()))}) {were} kept from earlier steps: this tape has {place}.",)


def _indexed(values: Mapping[int, _Value], count: int) -> tuple[Any, tuple[_Value, ...]]:
    """The index of each event in a table of the values that some events have, and the table."""
    column = np.full(count, -1, dtype=np.int64)
    known = sorted(values.items())
    numbers, table = interned(value for _, value in known)
    column[[row for row, _ in known]] = numbers
    return column, table


def _stacks(recorder: Recorder, own: tuple[str, ...]) -> tuple[list[tuple[Frame, ...]], Any]:
    """The stacks of the rows without frames of `own`, and the index of each interned stack among them."""
    # In the order of first use: the numbers are shared by all recordings of the process.
    used = [number for number in dict.fromkeys(event[_FIELD["stack"]] for event in recorder.events) if number >= 0]
    table: dict[tuple[Frame, ...], int] = {}
    index = np.full(max(used, default=-1) + 1, -1, dtype=np.int64)
    for number in used:
        frames = recorder.stacks.resolve(number, own)
        if frames:
            index[number] = table.setdefault(frames, len(table))
    return list(table), index


def late_ends(recorder: Recorder, tape: Tape) -> dict[int, int]:
    """Return for each free that waits for another stream the row of the tape before which it ends at the latest.

    A free is named by its place among all frees of the tape, which `build` has returned.
    """
    return _by_free_and_row(recorder, tape, recorder.late.ends)


def early_begins(recorder: Recorder, tape: Tape) -> dict[int, int]:
    """Return for each free of a block that only a collective held the row before which it begins at the earliest.

    A free is named by its place among all frees of the tape, which `build` has returned.
    """
    return _by_free_and_row(recorder, tape, recorder.early.begins)


def _by_free_and_row(recorder: Recorder, tape: Tape, events: Mapping[int, int | None]) -> dict[int, int]:
    """Return a table from the event of a free to another event by the place of the free and the row of the other.

    None is the end of the tape.
    """
    is_free = np.array([event[1] == Action.FREE_REQUESTED for event in recorder.events], dtype=np.int64)
    before = np.concatenate(([0], np.cumsum(is_free)))
    row_of = np.arange(len(before)) + before
    return {int(before[event]): len(tape) if to is None else int(row_of[to]) for event, to in events.items()}


def store_origins(recorder: Recorder, tape: Tape) -> None:
    """Set the `Origin` of every storage that outlives the recording, for later recordings."""
    is_free = np.array([event[1] == Action.FREE_REQUESTED for event in recorder.events], dtype=np.int64)
    row_of = np.arange(len(is_free)) + np.concatenate(([0], np.cumsum(is_free)[:-1])) if len(is_free) else is_free
    # A copy: making an Origin may start the garbage collector, which removes storages from `live`.
    for ref in list(recorder.live.values()):
        number = recorder.open_rows.get(ref.address, -1)
        if number >= 0:
            row = int(row_of[number])
            op, module, stack = int(tape.op[row]), int(tape.module[row]), int(tape.stack[row])
            ref.origin = Origin(
                tape.ops[op] if op >= 0 else "",
                tape.modules[module] if module >= 0 else "",
                tape.stacks[stack] if stack >= 0 else (),
                Category(int(tape.category[row])),
            )
