"""A snapshot file as columns, device by device; the only module that reads the fields of PyTorch's format.

A path goes in, one `Recorded` a device comes out (docs/allocator.md section 15). Old and new spellings of a field
are both read.
"""

from __future__ import annotations

import dataclasses
import gzip
import os
import zlib
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from memexplore.allocator import Settings
from memexplore.snapshot.plain import EVENT_COLUMNS, PlainData
from memexplore.snapshot.unpickle import unpickle
from memexplore.tape import Action

_ACTIONS = {action.name.lower(): int(action) for action in Action if action.name not in ("PREEXISTING", "MARK")}
_MIB = 1024**2
_LIMIT = 1 << 60  # devices have no larger addresses or sizes
_EXPANSION = 400  # a real snapshot shrinks to a tenth or a hundredth by gzip, an empty file to a thousandth
_LIVE, _PENDING, _FREE = "live", "pending", "free"
_STATES = {
    "active_allocated": _LIVE,
    "active_pending_free": _PENDING,
    "active_awaiting_free": _PENDING,
    "inactive": _FREE,
}


class RecordedBlock(NamedTuple):
    """A block of the final layout, sizes in bytes."""

    address: int
    size: int
    requested: int
    state: str
    """`live`, `pending` or `free`."""
    stack: int


class RecordedSegment(NamedTuple):
    """A segment of the final layout, sizes in bytes; of an expandable one each mapped run is a segment."""

    address: int
    size: int
    stream: int
    expandable: bool
    pool: tuple[int, int]
    """Identity of a private pool, (0, 0) for the default pools."""
    blocks: tuple[RecordedBlock, ...]


@dataclasses.dataclass(frozen=True)
class Recorded:
    """One device of a snapshot: its events as columns, its final segments by address, its settings."""

    device: int
    action: NDArray[np.int64]
    address: NDArray[np.int64]
    size: NDArray[np.int64]
    stream: NDArray[np.int64]
    time: NDArray[np.int64]
    """Microseconds; -1 without a clock."""
    stack: NDArray[np.int64]
    """Positions in `stacks`, -1 for none."""
    segments: tuple[RecordedSegment, ...]
    settings: Settings
    device_free: int | None
    """Free bytes of the device at the first oom; None without an oom."""
    stacks: tuple[list[Any], ...]
    """Lists of frame dictionaries as in the file, shared by all devices."""


def read(path: str | os.PathLike[str]) -> list[Recorded]:
    """Read the devices with events or segments from a snapshot file, plain or gzip.

    Raises ValueError with one sentence if the file is not a snapshot, FileNotFoundError if it does not exist.
    """
    name = os.fspath(path)
    with open(name, "rb") as file:
        data = file.read()
    try:
        if data[:2] == b"\x1f\x8b":
            data = _decompress(data)
        return _devices(unpickle(data))
    except (ValueError, KeyError, TypeError, AttributeError, OverflowError) as error:
        raise ValueError(f"{name} is not a snapshot that memexplore can read: {sentence(error)}") from error


def sentence(error: Exception) -> str:
    """Return the text of an error; for a KeyError the missing field."""
    return f"the field {error} is missing" if isinstance(error, KeyError) else str(error)


def _decompress(data: bytes) -> bytes:
    """Return the content of a gzip file.

    Raises ValueError if it is damaged, or larger than a snapshot of its compressed size can be.
    """
    limit = len(data) * _EXPANSION + 64 * _MIB
    parts = []
    try:
        while data:
            stream = zlib.decompressobj(wbits=31)
            part = stream.decompress(data, limit + 1)
            limit -= len(part)
            if limit < 0:
                raise ValueError("it unpacks to more than a snapshot of its length can hold")
            if not stream.eof:
                raise ValueError("it ends early")
            parts.append(part)
            data = stream.unused_data.lstrip(b"\0")
    except (zlib.error, gzip.BadGzipFile) as error:
        raise ValueError(f"its compression is damaged ({error})") from None
    return parts[0] if len(parts) == 1 else b"".join(parts)


def _devices(plain: PlainData) -> list[Recorded]:
    root = plain.root
    if type(root) is list:  # what torch.cuda.memory_snapshot() returns
        root = {"segments": root}
    if type(root) is not dict or type(root.get("segments")) is not list:
        raise ValueError("it holds no list of segments")
    traces = root.get("device_traces", [])
    if type(traces) is not list or not all(type(trace) is list for trace in traces):
        raise ValueError("its device_traces are not lists")
    if len({id(trace) for trace in traces}) < len(traces):
        raise ValueError("it holds one trace several times")
    rows = [_rows(plain, trace) for trace in traces]
    # Only now, because `_rows` adds the events that were read one by one.
    columns = [np.frombuffer(plain.columns[name], dtype=np.int64) for name in EVENT_COLUMNS]
    codes = np.array([*(_ACTIONS.get(name, -1) for name in plain.actions), -1])
    segments = _segments(plain, root["segments"])
    settings = _settings(root.get("allocator_settings"), any(segment.expandable for _, segment in segments))
    devices = []
    for device in range(max([len(rows) - 1, *(device for device, _ in segments)], default=-1) + 1):
        of_device = rows[device] if device < len(rows) else np.empty(0, dtype=np.int64)
        mine = tuple(sorted(segment for owner, segment in segments if owner == device))
        if any(left.address + left.size > right.address for left, right in pairwise(mine)):
            raise ValueError("two segments overlap")
        if not len(of_device) and not mine:
            continue
        action, address, size, stream, time, stack = (column[of_device] for column in columns)
        action = codes[action]
        supported = action >= 0
        _check_events(action[supported], address[supported], size[supported])
        devices.append(
            Recorded(
                device,
                action[supported],
                address[supported],
                size[supported],
                stream[supported],
                time[supported],
                stack[supported],
                mine,
                settings,
                next((plain.device_free[row] for row in of_device.tolist() if row in plain.device_free), None),
                tuple(plain.stacks),
            )
        )
    return devices


def _check_events(action: NDArray[np.int64], address: NDArray[np.int64], size: NDArray[np.int64]) -> None:
    with_address = (action != Action.OOM) & (action != Action.SNAPSHOT)
    if (size < 0).any() or (size >= _LIMIT).any() or (with_address & ((address < 0) | (address >= _LIMIT))).any():
        raise ValueError("an event has a size or an address that no device has")


def _rows(plain: PlainData, trace: list[Any]) -> NDArray[np.int64]:
    """Return the rows of a trace; events that are still dictionaries are added to the columns."""
    for index, event in enumerate(trace):
        if type(event) is dict:
            trace[index] = plain.add_event(event)
    rows = np.array(trace, dtype=np.int64) if trace else np.empty(0, dtype=np.int64)
    if rows.ndim != 1 or rows.min(initial=0) < 0 or rows.max(initial=-1) >= len(plain.columns["action"]):
        raise ValueError("a trace has an entry that is not an event")
    return rows


def _segments(plain: PlainData, entries: list[Any]) -> list[tuple[int, RecordedSegment]]:
    segments = []
    seen = set()
    for each in entries:
        blocks = each["blocks"]
        if id(blocks) in seen or type(blocks) is not list:
            raise ValueError("it holds one list of blocks several times")
        seen.add(id(blocks))
        pool = each.get("segment_pool_id", (0, 0))
        if type(pool) not in (tuple, list) or len(pool) != 2:
            raise ValueError(f"a segment_pool_id is a pair of numbers, not {pool!r:.40}")
        address = _whole(each["address"])
        segment = RecordedSegment(
            address,
            _whole(each["total_size"]),
            _whole(each.get("stream", 0)),
            each.get("is_expandable") is True,
            (_whole(pool[0]), _whole(pool[1])),
            tuple(_blocks(plain, address, blocks)),
        )
        end = address
        for block in segment.blocks:
            if block.address < end:
                raise ValueError("two blocks of a segment overlap")
            end = block.address + block.size
        if end > address + segment.size:
            raise ValueError("a block reaches beyond its segment")
        device = _whole(each.get("device", 0))
        if not 0 <= device < 4096:
            raise ValueError(f"a device has a number from 0 on, not {device}")
        segments.append((device, segment))
    return segments


def _blocks(plain: PlainData, address: int, blocks: list[Any]) -> list[RecordedBlock]:
    result = []
    for block in blocks:
        state = _STATES.get(block["state"])
        if state is None:
            raise ValueError(f"a block has an unknown state {block['state']!r:.40}")
        size = _whole(block["size"])
        # Before torch 2.1 a block had no address field: each block follows the one before.
        address = _whole(block.get("address", address))
        requested = _whole(block.get("requested_size", size))
        result.append(RecordedBlock(address, size, requested, state, plain.stack_number(block.get("frames"))))
        address += size
    return result


def _whole(value: object) -> int:
    if type(value) is not int or not 0 <= value < _LIMIT:
        raise ValueError(f"an address or a size is a whole number of bytes, not {value!r:.40}")
    return value


def _settings(entries: object, expandable: bool) -> Settings:
    """Return the settings that a snapshot records (since torch 2.2); PyTorch's defaults for the others."""
    if type(entries) is not dict:
        return Settings(expandable_segments=expandable)
    text = entries.get("PYTORCH_CUDA_ALLOC_CONF") or entries.get("PYTORCH_ALLOC_CONF") or ""
    try:
        settings = Settings.parse(text) if type(text) is str else Settings()
    except ValueError:
        settings = Settings()  # options of other releases; the fields below hold those that matter
    changes: dict[str, Any] = {"expandable_segments": entries.get("expandable_segments") is True or expandable}
    limit = entries.get("max_split_size", -1)
    if type(limit) is int and limit > 0:
        changes["max_split_size"] = limit
    threshold = entries.get("garbage_collection_threshold", 0.0)
    if isinstance(threshold, float) and threshold > 0:
        changes["garbage_collection_threshold"] = threshold
    divisions = entries.get("roundup_power2_divisions")
    if type(divisions) is dict and any(divisions.values()):
        table = [divisions.get(str(1 << index), 0) for index in range(len(settings.roundup_power2_divisions))]
        changes["roundup_power2_divisions"] = tuple(table)
    return dataclasses.replace(settings, **changes)
