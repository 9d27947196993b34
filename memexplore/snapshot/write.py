"""Write a Tape as a PyTorch snapshot: file, dictionaries, and the segments and blocks at the end of the tape."""

from __future__ import annotations

import os
import pickle
import re
from bisect import bisect_left
from typing import Any

import numpy as np

from memexplore.allocator import Settings, block_sizes
from memexplore.allocator.actions import GROWTH
from memexplore.analysis.segments import segments_at_end
from memexplore.snapshot.history import initial_row_count, reserved
from memexplore.tape import Action, Category, Tape
from memexplore.tape.allocator_settings import INTERVALS, UNLIMITED

_WITHOUT_ADDRESS = (Action.SNAPSHOT, Action.OOM, Action.MARK)


def save_snapshot(tape: Tape, path: str | os.PathLike[str]) -> None:
    """Write a tape as a snapshot file that PyTorch's viewer and `torch.cuda._memory_viz` read.

    The first frame of a stack names op, category and module if the tape has them. Marks of steps and phases are left
    out. Raises ValueError for a tape without device addresses or without segments; a CPU tape has neither.
    """
    snapshot = as_snapshot(tape)
    with open(path, "wb") as file:
        pickle.dump(snapshot, file, protocol=4)


def as_snapshot(tape: Tape) -> dict[str, Any]:
    """Return a tape in the form of `torch.cuda.memory._snapshot()`; see `save_snapshot`."""
    if np.any((tape.action == Action.ALLOC) & (tape.address < 0) & (tape.size > 0)):
        raise ValueError("this tape has no device addresses: call replay(tape) first, which assigns them")
    if not np.isin(tape.action, GROWTH).any() and np.any(tape.size):
        raise ValueError("this tape has no segments: call replay(tape) first, which adds them")
    device = device_number(tape)
    frames = _Frames(tape)
    return {
        "segments": layout(tape, frames=frames, device=device),
        "device_traces": [[] for _ in range(device)] + [_trace(tape, frames)],
        "allocator_settings": _settings(Settings.parse(tape.meta.settings)),
        "external_annotations": [],
    }


def device_number(tape: Tape) -> int:
    """Return the number of a tape's device, such as 1 for `cuda:1`; 0 for a name without a number.

    >>> from memexplore.tape import Meta, Source
    >>> [device_number(Tape.from_columns({}, meta=Meta(Source.MEASURED, name))) for name in ("cuda:1", "Tesla T4")]
    [1, 0]
    """
    match = re.fullmatch(r"cuda:([0-9]{1,3})", tape.meta.device)
    return int(match[1]) if match else 0


class _Frames:
    """The frames of rows as a snapshot has them; equal stacks share one list."""

    def __init__(self, tape: Tape) -> None:
        self.tape = tape
        self.stacks: dict[tuple[int, int, int, int], list[dict[str, Any]]] = {}
        self.frames: dict[Any, dict[str, Any]] = {}

    def of(self, row: int) -> list[dict[str, Any]]:
        """Return the frames of a row, innermost first."""
        tape = self.tape
        stack, op, module, category = (int(column[row]) for column in (tape.stack, tape.op, tape.module, tape.category))
        key = stack, op, module, category
        if key not in self.stacks:
            lines = tape.stacks[stack] if stack >= 0 else ()
            self.stacks[key] = [self._label(op, module, category)] if op >= 0 or module >= 0 else []
            self.stacks[key] += [self._frame(*line) for line in lines]
        return self.stacks[key]

    def _label(self, op: int, module: int, category: int) -> dict[str, Any]:
        """Return the frame that `stacks.parse_label` reads."""
        name = self.tape.ops[op] if op >= 0 else ""
        layer = self.tape.modules[module] if module >= 0 else ""
        return self._frame(layer or "-", 0, f"{name} ({Category(category).text})".strip())

    def _frame(self, filename: str, line: int, name: str) -> dict[str, Any]:
        key = filename, line, name
        if key not in self.frames:
            self.frames[key] = {"name": name, "filename": filename, "line": line}
        return self.frames[key]


def _trace(tape: Tape, frames: _Frames) -> list[dict[str, Any]]:
    events = []
    begin = initial_row_count(tape)
    reserved_bytes = reserved(tape)
    columns = (tape.action, tape.address, tape.size, tape.stream, tape.time)
    names = [action.name.lower() for action in Action]
    for row, (action, address, size, stream, time) in enumerate(
        zip(*(column[begin:].tolist() for column in columns), strict=True), begin
    ):
        if action in (Action.MARK, Action.PREEXISTING) or (address < 0 and action not in _WITHOUT_ADDRESS):
            continue
        event: dict[str, Any] = {"action": names[action]}
        if action == Action.OOM:
            capacity = tape.meta.capacity
            event["device_free"] = capacity - int(reserved_bytes[row]) if capacity is not None else 0
        else:
            event["addr"] = max(address, 0)
        event |= {"size": size, "stream": stream, "time_us": time // 1000, "frames": frames.of(row)}
        events.append(event)
    return events


def layout(tape: Tape, *, frames: _Frames | None = None, device: int = 0) -> list[dict[str, Any]]:
    """Return the segments and blocks at the end of a tape in the form of `torch.cuda.memory._snapshot()["segments"]`.

    Sizes and addresses in bytes, segments by address. For the layout after an earlier row pass a slice of the tape.

    >>> from memexplore.allocator import replay
    >>> from memexplore.tape import Meta, Source
    >>> rows = {"action": [Action.ALLOC], "address": [1], "size": [700]}
    >>> segment, = layout(replay(Tape.from_columns(rows, meta=Meta(Source.MEASURED, "cuda:0"))))
    >>> segment["total_size"], [(block["size"], block["state"]) for block in segment["blocks"]]
    (2097152, [(1024, 'active_allocated'), (2096128, 'inactive')])
    """
    frames = frames if frames is not None else _Frames(tape)
    sizes = block_sizes(tape)
    taken: dict[int, tuple[int, str]] = {}
    rows = np.flatnonzero(tape.action <= Action.FREE_COMPLETED)
    rows = np.union1d(rows, np.flatnonzero(tape.action == Action.PREEXISTING))
    for row, action, address in zip(
        rows.tolist(), tape.action[rows].tolist(), tape.address[rows].tolist(), strict=True
    ):
        if action == Action.FREE_COMPLETED:
            taken.pop(address, None)
        elif action == Action.FREE_REQUESTED:
            if address in taken:
                taken[address] = (taken[address][0], "active_pending_free")
        elif sizes[row]:
            taken[address] = (row, "active_allocated")
    addresses = sorted(taken)
    segments = []
    for start, end, stream, expandable, small in segments_at_end(tape):
        blocks: list[dict[str, Any]] = []
        position = start
        for address in [*addresses[bisect_left(addresses, start) : bisect_left(addresses, end)], end]:
            if position < address:
                blocks.append(_block(position, address - position, 0, "inactive", []))
            if address < end:
                row, state = taken[address]
                blocks.append(_block(address, int(sizes[row]), int(tape.size[row]), state, frames.of(row)))
                position = address + int(sizes[row])
        segments.append(_segment(start, end, stream, expandable, small, blocks, device))
    return segments


def _segment(
    start: int, end: int, stream: int, expandable: bool, small: bool, blocks: list[dict[str, Any]], device: int
) -> dict[str, Any]:
    active = [block for block in blocks if block["state"] != "inactive"]
    return {
        "device": device,
        "address": start,
        "total_size": end - start,
        "allocated_size": sum(block["size"] for block in active if block["state"] == "active_allocated"),
        "active_size": sum(block["size"] for block in active),
        "requested_size": sum(block["requested_size"] for block in active),
        "stream": stream,
        "segment_type": "small" if small else "large",
        "segment_pool_id": (0, 0),
        "is_expandable": expandable,
        "frames": [],
        "blocks": blocks,
    }


def _block(address: int, size: int, requested: int, state: str, frames: list[dict[str, Any]]) -> dict[str, Any]:
    return {"address": address, "size": size, "requested_size": requested, "state": state, "frames": frames}


def _settings(settings: Settings) -> dict[str, Any]:
    divisions = settings.roundup_power2_divisions
    return {
        "PYTORCH_CUDA_ALLOC_CONF": str(settings),
        "max_split_size": -1 if settings.max_split_size == UNLIMITED else settings.max_split_size,
        "garbage_collection_threshold": settings.garbage_collection_threshold,
        "expandable_segments": settings.expandable_segments,
        "roundup_power2_divisions": {str(1 << index): divisions[index] for index in range(INTERVALS)},
    }
