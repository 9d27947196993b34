"""The history of the real CUDA allocator, annotated with the ops and layers of a recorder.

In: the tape of the allocator's history and the tape of the recorder, of the same run. Out: one tape.
"""

from __future__ import annotations

import dataclasses
import os
import platform
import sys
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from memexplore import gpu_catalogue
from memexplore.gpu_catalogue import Gpu
from memexplore.process_limit import limited
from memexplore.tape import COLUMNS, Action, Category, Meta, Os, Source, Tape


def meta(device: torch.device, versions: Mapping[str, str]) -> Meta:
    """Return the metadata of a recording on a CUDA device."""
    free, total = torch.cuda.mem_get_info(device)
    reserved = torch.cuda.memory_reserved(device)
    found = Meta(
        source=Source.MEASURED,
        device=torch.cuda.get_device_name(device),
        gpu=catalogue_gpu(device).key,
        capacity=free + reserved,
        total=total,
        settings=os.environ.get("PYTORCH_CUDA_ALLOC_CONF") or os.environ.get("PYTORCH_ALLOC_CONF") or "",
        versions=dict(versions),
        os=operating_system(sys.platform, platform.release()),
    )
    return limited(found, memory_limit(device))


def memory_limit(device: torch.device) -> int | None:
    """Return the bytes that this process may reserve on a CUDA device, None without a limit.

    `torch.cuda.set_per_process_memory_fraction` and the allocator setting of that name set the limit.
    """
    fraction = torch.cuda.get_per_process_memory_fraction(device)
    return int(fraction * torch.cuda.get_device_properties(device).total_memory) if fraction < 1 else None


def operating_system(system: str, kernel: str) -> Os:
    """Return the operating system from `sys.platform` and `platform.release()`; the kernel of WSL names Microsoft.

    >>> operating_system("linux", "5.15.167.4-microsoft-standard-WSL2").value, operating_system("win32", "11").value
    ('wsl', 'windows')
    """
    if system == "win32":
        return Os.WINDOWS
    return Os.WSL if "microsoft" in kernel.lower() else Os.LINUX


def catalogue_gpu(device: torch.device) -> Gpu:
    """Return the catalogue entry of a CUDA device, with the memory of this device and the limit of this process.

    A GPU missing in the catalogue is a `Gpu` of its size and compute capability.
    """
    properties, limit = torch.cuda.get_device_properties(device), memory_limit(device)
    table = gpu_catalogue.gpus()
    # The RTX 3060 was sold with 8 and with 12 GB under one name.
    named = (table[table["name"] == properties.name]["total"] - properties.total_memory).abs()
    if len(named):
        gpu = gpu_catalogue.find(str(named.idxmin()))
        return dataclasses.replace(gpu, total=properties.total_memory, limit=limit)
    return dataclasses.replace(
        gpu_catalogue.find(f"{properties.total_memory}B"),
        name=properties.name,
        compute_capability=(properties.major, properties.minor),
        multiprocessors=properties.multi_processor_count,
        note="This GPU is not in the catalogue: its memory outside the allocator and its speed are unknown.",
        limit=limit,
    )


def annotate(history: Tape, recorded: Tape) -> Tape:
    """Return the allocator's rows, each with op, layer, phase, step and category of the recorded row it belongs to.

    Both tapes are of one run: `history` has every request with its address, `recorded` the requests that became
    storages, with op and layer. A recorded block is the next request of the history with its address and size. Requests
    in between were made by kernels beside their outputs: they belong to the op before them, as a temporary if they are
    freed and as a workspace if they stay. A mark of the recorded tape comes in front of the request that follows it.
    """
    match = _matches(history, recorded)
    columns: dict[str, Any] = {name: getattr(history, name).copy() for name in COLUMNS}
    rows = np.flatnonzero((match >= 0) & (recorded.action != Action.FREE_REQUESTED))
    matched = match[rows]
    for name in ("category", "phase", "step"):
        columns[name][matched] = getattr(recorded, name)[rows]
    columns["op"][:] = -1
    columns["module"][:] = -1
    columns["op"][matched], columns["module"][matched] = recorded.op[rows], recorded.module[rows]
    columns["tensor"][matched] = recorded.tensor[rows]
    offset = len(history.stacks)
    has_stack = recorded.stack[rows] >= 0
    columns["stack"][matched[has_stack]] = recorded.stack[rows][has_stack] + offset

    _fill(history, columns, matched)
    tape = recorded.with_rows(columns, stacks=[*history.stacks, *recorded.stacks])
    return _with_marks(tape, recorded, match)


def _matches(history: Tape, recorded: Tape) -> Any:
    """Return the matching row of the history for each recorded alloc, free and oom row, -1 for none."""
    # An older block and a new one may have the same address and size, the older one unseen by the recorder.
    older, new = (_by_place(history, action) for action in (Action.PREEXISTING, Action.ALLOC))
    result = np.full(len(recorded), -1, dtype=np.int64)
    for row in np.flatnonzero(np.isin(recorded.action, (Action.ALLOC, Action.PREEXISTING))).tolist():
        place = int(recorded.address[row]), int(recorded.size[row])
        waiting = new.get(place)
        if recorded.action[row] == Action.PREEXISTING:
            # A block that another thread made since the history began is older for the recorder only.
            waiting = older.get(place) or waiting
        if waiting:
            result[row] = waiting.pop()
    freed = _frees(history)
    for block, row in _frees(recorded).items():
        if result[block] >= 0:
            result[row] = freed.get(int(result[block]), -1)
    # From the last to the first, as an op may run out of memory and try again with a smaller request.
    failed = [np.flatnonzero(tape.action == Action.OOM)[::-1] for tape in (recorded, history)]
    for row, history_row in zip(*failed, strict=False):
        result[row] = history_row
    return result


def _by_place(history: Tape, action: Action) -> dict[tuple[int, int], list[int]]:
    """Return the rows of an action by address and size, the last first."""
    rows: dict[tuple[int, int], list[int]] = {}
    for row in np.flatnonzero(history.action == action)[::-1].tolist():
        rows.setdefault((int(history.address[row]), int(history.size[row])), []).append(row)
    return rows


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


def _fill(history: Tape, columns: dict[str, Any], matched: Any) -> None:
    """Give rows that were not recorded the op before them, and frees the category of their block."""
    recorded = np.zeros(len(history), dtype=bool)
    recorded[matched] = True
    last = np.maximum.accumulate(np.where(recorded, np.arange(len(history)), -1))
    born = np.isin(history.action, (Action.ALLOC, Action.PREEXISTING))
    between = (history.action == Action.ALLOC) & ~recorded & (last >= 0)
    for name in ("op", "module"):
        columns[name][between] = columns[name][last[between]]
    for name in ("phase", "step"):
        columns[name][last >= 0] = columns[name][last[last >= 0]]
    open_blocks: dict[int, int] = {}
    category = columns["category"]
    category[(history.action == Action.ALLOC) & ~recorded] = Category.WORKSPACE
    for row in np.flatnonzero(born | np.isin(history.action, (Action.FREE_REQUESTED, Action.FREE_COMPLETED))).tolist():
        address = int(history.address[row])
        if born[row]:
            open_blocks[address] = row
        elif address in open_blocks:
            block = open_blocks[address]
            if not recorded[block] and history.action[block] == Action.ALLOC:
                category[block] = Category.TEMPORARY
            category[row] = category[block]


def _with_marks(tape: Tape, recorded: Tape, match: Any) -> Tape:
    marks = np.flatnonzero(recorded.action == Action.MARK)
    if not len(marks):
        return tape
    following = np.full(len(recorded) + 1, len(tape), dtype=np.int64)
    for row in range(len(recorded) - 1, -1, -1):
        following[row] = match[row] if match[row] >= 0 else following[row + 1]
    columns: dict[str, Any] = {}
    for name in COLUMNS:
        columns[name] = np.insert(getattr(tape, name), following[marks], getattr(recorded, name)[marks])
    is_mark = np.insert(np.zeros(len(tape), dtype=bool), following[marks], True)
    columns["stack"][is_mark] = -1
    # A phase lasts until the next mark, whatever phase the rows were matched to.
    last_mark = np.maximum.accumulate(np.where(is_mark, np.arange(len(is_mark)), -1))
    inside = last_mark >= 0
    for name in ("phase", "step"):
        columns[name][inside] = columns[name][last_mark[inside]]
    columns["time"] = np.maximum.accumulate(columns["time"])
    return tape.with_rows(columns)
