"""Snapshots as PyTorch writes them, their files, and the rows of the tapes that are read from them."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

from memexplore import snapshot
from memexplore.tape import Action, Tape

MIB = 1024**2
BASE = 0x7F0000000000

LINE = {"name": "forward", "filename": "/home/me/model.py", "line": 12}
STEP = {"name": "step", "filename": "/venv/torch/optim/adamw.py", "line": 230}
NATIVE = {"name": "at::_ops::mm::call(at::Tensor const&, at::Tensor const&)", "filename": "??", "line": 0}


def event(action: str, address: int, size: int, **others: Any) -> dict[str, Any]:
    return {"action": action, "addr": address, "size": size, "stream": 0, "time_us": 5, "frames": [LINE]} | others


def block(address: int, size: int, requested: int, state: str = "active_allocated") -> dict[str, Any]:
    return {"address": address, "size": size, "requested_size": requested, "state": state, "frames": [LINE]}


def segment(address: int, size: int, *blocks: dict[str, Any], **others: Any) -> dict[str, Any]:
    return {
        "device": 0,
        "address": address,
        "total_size": size,
        "stream": 0,
        "segment_type": "small" if size == 2 * MIB else "large",
        "segment_pool_id": (0, 0),
        "is_expandable": False,
        "frames": [],
        "blocks": list(blocks),
    } | others


def small_snapshot() -> dict[str, Any]:
    """One request of 700 bytes: its segment, its block and the rest of the segment."""
    events = [event("segment_alloc", BASE, 2 * MIB), event("alloc", BASE, 700)]
    rest = block(BASE + 1024, 2 * MIB - 1024, 0, "inactive")
    return {"segments": [segment(BASE, 2 * MIB, block(BASE, 1024, 700), rest)], "device_traces": [events]}


def written(path: Path, content: object, protocol: int = 4) -> Path:
    file = path / "snapshot.pickle"
    file.write_bytes(pickle.dumps(content, protocol))
    return file


def load_one(file: Path) -> Tape:
    [tape] = snapshot.load(file).values()
    return tape


def rows_of(tape: Tape) -> list[tuple[str, int, int]]:
    columns = (tape.action.tolist(), tape.address.tolist(), tape.size.tolist())
    return [(Action(action).name.lower(), address, size) for action, address, size in zip(*columns, strict=True)]
