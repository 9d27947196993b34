"""Kept recordings: of each real memory snapshot the columns that the tests need, as one gzipped JSON file.

`keep` turns the devices of a snapshot (`memexplore.snapshot.recorded.Recorded`) into plain data, `devices` turns the
file of a recording back into them. Kept are the action, address, size and stream of every event, the segments and
blocks of the final layout, and the settings. Neither clock nor frames are kept. In place of a stack stand the facts
that the import uses (`memexplore.snapshot.stacks`):

- its origin (`Origin`),
- the innermost layer call that was open; `calls` lists the call around each call, so that two stacks share the calls
  of their common path,
- whether its innermost Python line lies in torch/amp/autocast_mode.py.

`devices` builds a stack of invented frames that has the same three properties.
"""

from __future__ import annotations

import functools
import gzip
import json
import pathlib
from typing import Any, NamedTuple

import numpy as np

from memexplore.allocator import Settings
from memexplore.snapshot.history import tape_of
from memexplore.snapshot.recorded import Recorded, RecordedBlock, RecordedSegment
from memexplore.snapshot.stacks import Call, Origin, Stacks
from memexplore.tape import Tape

DATA = pathlib.Path(__file__).parent
RECORDINGS = DATA / "recordings"
INDEX = RECORDINGS / "index.csv"
"""One row a recording and device: its source, its content and what an exact model reproduces of it."""
PUBLISHED_PEAKS = DATA / "published_peaks.csv"
"""Peaks that other people measured, with their sources."""
COLUMNS = ("action", "address", "size", "stream")


class StackClass(NamedTuple):
    """What the tests need of a stack."""

    origin: int
    call: int
    """The innermost open layer call, a position in `calls`; -1 outside any layer."""
    in_autocast: bool


def keep(recorded: Recorded) -> dict[str, Any]:
    """The device as plain data: lists, texts, numbers and None."""
    stacks = Stacks(recorded)
    calls: dict[tuple[Call, ...], int] = {(): -1}
    classes: dict[StackClass, int] = {}
    class_of = {-1: -1}

    def kept_stack(stack: int) -> int:
        if stack not in class_of:
            path = stacks.calls[stack]
            for depth in range(1, len(path) + 1):
                calls.setdefault(path[:depth], len(calls) - 1)
            lines = stacks.stacks[stacks.number[stack]]
            in_autocast = bool(lines) and lines[0].filename.endswith("autocast_mode.py")
            found = StackClass(int(stacks.origin[stack]), calls[path], in_autocast)
            class_of[stack] = classes.setdefault(found, len(classes))
        return class_of[stack]

    data: dict[str, Any] = {name: getattr(recorded, name).tolist() for name in COLUMNS}
    data["stack"] = [kept_stack(stack) for stack in recorded.stack.tolist()]
    data["segments"] = [
        [*segment[:-1], [[*block[:-1], kept_stack(block.stack)] for block in segment.blocks]]
        for segment in recorded.segments
    ]
    data["stacks"] = list(classes)
    data["calls"] = [calls[path[:-1]] for path in calls if path]
    data["native"] = stacks.native
    return data | {
        "device": recorded.device,
        "settings": str(recorded.settings),
        "device_free": recorded.device_free,
    }


def restored(data: dict[str, Any]) -> Recorded:
    """The device that `keep` was given, without clock, its stacks replaced by invented ones of the same class."""
    columns = {name: np.array(data[name], dtype=np.int64) for name in (*COLUMNS, "stack")}
    segments = tuple(
        RecordedSegment(*fields, tuple(pool), tuple(RecordedBlock(*block) for block in blocks))
        for *fields, pool, blocks in data["segments"]
    )
    return Recorded(
        device=data["device"],
        **columns,
        time=np.full(len(columns["action"]), -1),
        segments=segments,
        settings=Settings.parse(data["settings"]),
        device_free=data["device_free"],
        stacks=tuple(_frames(StackClass(*each), data["calls"], data["native"]) for each in data["stacks"]),
    )


_MARKS: dict[Origin, tuple[str, str]] = {
    Origin.USER: ("user.py", "main"),
    Origin.BACKWARD: ("torch/autograd/__init__.py", "backward"),
    Origin.RECOMPUTE: ("torch/autograd/__init__.py", "backward"),
    Origin.ACCUMULATE: ("??", "torch::autograd::AccumulateGrad::apply"),
    Origin.OPTIMIZER: ("torch/optim/optimizer.py", "step"),
    Origin.ZERO_GRAD: ("torch/optim/optimizer.py", "zero_grad"),
    Origin.MODEL: ("model.py", "__init__"),
    Origin.DATA: ("torch/utils/data/dataloader.py", "__next__"),
    Origin.WORKSPACE: ("??", "at::cuda::getNewWorkspace"),
}
"""File and function of a frame by which `origin_of` recognises the origin; a layer's call needs none."""


def _frames(stack: StackClass, parents: list[int], native: bool) -> list[dict[str, Any]]:
    """Frames of a stack of this class, innermost first."""
    frames: list[tuple[str, str]] = []
    if stack.in_autocast:
        frames.append(("torch/amp/autocast_mode.py", "__exit__"))
    if stack.origin in _MARKS:
        frames.append(_MARKS[Origin(stack.origin)])
    call = stack.call
    while call >= 0:
        frames += [
            (f"layer_{call}.py", "forward"),
            ("torch/nn/modules/module.py", "_call_impl"),
            (f"caller_{call}.py", "forward"),
        ]
        call = parents[call]
    if native:
        frames.append(("??", "main"))
    return [{"filename": filename, "line": 1, "name": name} for filename, name in frames]


def write(path: pathlib.Path, recorded: list[Recorded]) -> int:
    """Write the kept columns of a recording and return the size of the file in bytes."""
    text = json.dumps([keep(device) for device in recorded], separators=(",", ":"))
    path.write_bytes(gzip.compress(text.encode(), 9, mtime=0))
    return path.stat().st_size


@functools.cache
def devices(name: str) -> dict[int, Recorded]:
    """The devices of a recording by number; `name` is that of its file in the collection without `.pickle.gz`."""
    data = json.loads(gzip.decompress((RECORDINGS / f"{name}.json.gz").read_bytes()))
    return {each["device"]: restored(each) for each in data}


@functools.cache
def tape(name: str, device: int = 0) -> Tape:
    """The Tape of one device of a recording."""
    return tape_of(devices(name)[device])
