"""The real allocator's own history, explained by what was noted of ops and layers."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import tempfile
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
import torch

from memexplore import gpu_catalogue, snapshot
from memexplore.gpu_catalogue import Gpu
from memexplore.tape import Action, Category, Meta, Source, Tape
from memexplore.torch_internals.cuda import DUMP_SNAPSHOT, RECORD_HISTORY

MAX_EVENTS = 4_000_000
COLUMNS = ("time", "action", "address", "size", "stream", "category", "phase", "step", "op", "module", "stack")


def meta(device: torch.device, versions: Mapping[str, str]) -> Meta:
    """What is true of a recording on a CUDA device."""
    free, total = torch.cuda.mem_get_info(device)
    reserved = torch.cuda.memory_reserved(device)
    return Meta(
        source=Source.MEASURED,
        device=torch.cuda.get_device_name(device),
        gpu=catalogue_gpu(device).key,
        capacity=free + reserved,
        total=total,
        settings=os.environ.get("PYTORCH_CUDA_ALLOC_CONF") or os.environ.get("PYTORCH_ALLOC_CONF") or "",
        versions=dict(versions),
    )


def catalogue_gpu(device: torch.device) -> Gpu:
    """The virtual GPU that is like a CUDA device: its entry in the catalogue with the memory that this one has.

    A card that the catalogue does not know is like one of its size and compute capability.
    """
    properties = torch.cuda.get_device_properties(device)
    table = gpu_catalogue.gpus()
    # The RTX 3060 was sold with 8 and with 12 GB under one name.
    named = (table[table["name"] == properties.name]["total"] - properties.total_memory).abs()
    if len(named):
        return dataclasses.replace(gpu_catalogue.find(str(named.idxmin())), total=properties.total_memory)
    return dataclasses.replace(
        gpu_catalogue.find(f"{properties.total_memory}B"),
        name=properties.name,
        compute_capability=(properties.major, properties.minor),
        multiprocessors=properties.multi_processor_count,
        note="The catalogue does not know this card: its memory outside the allocator and its speed are not known.",
    )


@contextlib.contextmanager
def history(device: torch.device) -> Iterator[Callable[[], Tape]]:
    """Let the allocator record its history in the block; the yielded function takes it as a Tape."""
    RECORD_HISTORY.value(max_entries=MAX_EVENTS, stacks="python")

    def taken() -> Tape:
        torch.cuda.synchronize(device)
        with tempfile.TemporaryDirectory() as folder:
            path = os.path.join(folder, "history.pickle")
            DUMP_SNAPSHOT.value(path)
            return snapshot.load(path)[device.index or 0]

    try:
        yield taken
    finally:
        RECORD_HISTORY.value(enabled=None)


def annotate(history: Tape, noted: Tape) -> Tape:
    """The allocator's rows, with op, layer, phase, step and category of the noted row each belongs to.

    Both tapes tell the same run: ``history`` every request with its address, ``noted`` those that became storages, with
    their meaning. A noted block is the next request of the history with its address and size. What lies between is what
    kernels took beside their outputs: it belongs to the op before it, as a temporary where it is freed again and as a
    workspace where it stays. Marks of the noted tape come in front of the request that follows them.
    """
    match = _matches(history, noted)
    columns: dict[str, Any] = {name: getattr(history, name).copy() for name in COLUMNS}
    rows = np.flatnonzero((match >= 0) & (noted.action != Action.FREE_REQUESTED))
    matched = match[rows]
    for name in ("category", "phase", "step"):
        columns[name][matched] = getattr(noted, name)[rows]
    columns["op"][:] = -1
    columns["module"][:] = -1
    columns["op"][matched], columns["module"][matched] = noted.op[rows], noted.module[rows]
    offset = len(history.stacks)
    has_stack = noted.stack[rows] >= 0
    columns["stack"][matched[has_stack]] = noted.stack[rows][has_stack] + offset

    _fill(history, columns, matched)
    tape = Tape.from_columns(
        columns,
        meta=noted.meta,
        ops=noted.ops,
        modules=noted.modules,
        stacks=[*history.stacks, *noted.stacks],
    )
    return _with_marks(tape, noted, match)


def _matches(history: Tape, noted: Tape) -> Any:
    """For each noted row that makes or frees a block or finds no memory the history row that does so, -1 for none."""
    places: dict[tuple[int, int], list[int]] = {}
    born = np.isin(history.action, (Action.ALLOC, Action.PREEXISTING))
    for row in np.flatnonzero(born)[::-1].tolist():
        places.setdefault((int(history.address[row]), int(history.size[row])), []).append(row)
    result = np.full(len(noted), -1, dtype=np.int64)
    for row in np.flatnonzero(np.isin(noted.action, (Action.ALLOC, Action.PREEXISTING))).tolist():
        waiting = places.get((int(noted.address[row]), int(noted.size[row])))
        if waiting:
            result[row] = waiting.pop()
    freed = _frees(history)
    for block, row in _frees(noted).items():
        if result[block] >= 0:
            result[row] = freed.get(int(result[block]), -1)
    # Backwards, as an op may find no memory for a first try and for a second with less.
    failed = [np.flatnonzero(tape.action == Action.OOM)[::-1] for tape in (noted, history)]
    for row, found in zip(*failed, strict=False):
        result[row] = found
    return result


def _frees(tape: Tape) -> dict[int, int]:
    """For each block's row the row that asks for its free."""
    result: dict[int, int] = {}
    open_blocks: dict[int, int] = {}
    for row in np.flatnonzero(np.isin(tape.action, (Action.ALLOC, Action.PREEXISTING, Action.FREE_REQUESTED))).tolist():
        address = int(tape.address[row])
        if tape.action[row] != Action.FREE_REQUESTED:
            open_blocks[address] = row
        elif address in open_blocks:
            result[open_blocks.pop(address)] = row
    return result


def _fill(history: Tape, columns: dict[str, Any], matched: Any) -> None:
    """Give what nobody noted the op before it, and frees the category of their block."""
    known = np.zeros(len(history), dtype=bool)
    known[matched] = True
    last = np.maximum.accumulate(np.where(known, np.arange(len(history)), -1))
    born = np.isin(history.action, (Action.ALLOC, Action.PREEXISTING))
    between = (history.action == Action.ALLOC) & ~known & (last >= 0)
    for name in ("op", "module"):
        columns[name][between] = columns[name][last[between]]
    for name in ("phase", "step"):
        columns[name][last >= 0] = columns[name][last[last >= 0]]
    open_blocks: dict[int, int] = {}
    category = columns["category"]
    category[(history.action == Action.ALLOC) & ~known] = Category.WORKSPACE
    for row in np.flatnonzero(born | np.isin(history.action, (Action.FREE_REQUESTED, Action.FREE_COMPLETED))).tolist():
        address = int(history.address[row])
        if born[row]:
            open_blocks[address] = row
        elif address in open_blocks:
            block = open_blocks[address]
            if not known[block] and history.action[block] == Action.ALLOC:
                category[block] = Category.TEMPORARY
            category[row] = category[block]


def _with_marks(tape: Tape, noted: Tape, match: Any) -> Tape:
    marks = np.flatnonzero(noted.action == Action.MARK)
    if not len(marks):
        return tape
    following = np.full(len(noted) + 1, len(tape), dtype=np.int64)
    for row in range(len(noted) - 1, -1, -1):
        following[row] = match[row] if match[row] >= 0 else following[row + 1]
    columns: dict[str, Any] = {}
    for name in COLUMNS:
        columns[name] = np.insert(getattr(tape, name), following[marks], getattr(noted, name)[marks])
    place = np.insert(np.zeros(len(tape), dtype=bool), following[marks], True)
    columns["stack"][place] = -1
    # A phase goes on until the next mark, whatever the row before it was part of.
    border = np.maximum.accumulate(np.where(place, np.arange(len(place)), -1))
    inside = border >= 0
    for name in ("phase", "step"):
        columns[name][inside] = columns[name][border[inside]]
    columns["time"] = np.maximum.accumulate(columns["time"])
    return Tape.from_columns(columns, meta=tape.meta, ops=tape.ops, modules=tape.modules, stacks=tape.stacks)
