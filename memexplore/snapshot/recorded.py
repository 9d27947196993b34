"""Read the fields of PyTorch's snapshot format as columns: one `Recorded` a device.

No other module reads them (docs/allocator.md section 15). Old and new spellings of a field are both read.
"""

from __future__ import annotations

import dataclasses
import os
import zlib
from collections import defaultdict
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from memexplore.allocator import Settings
from memexplore.snapshot.plain import EVENT_COLUMNS, PlainData
from memexplore.snapshot.unpickle import unpickle
from memexplore.tape import Action
from memexplore.tape.allocator_settings import UNLIMITED
from memexplore.text.untrusted import shown

_ACTIONS = {action.name.lower(): int(action) for action in Action if action.name not in ("PREEXISTING", "MARK")}
_MIB = 1024**2
_LIMIT = 1 << 60  # devices have no larger addresses or sizes
_EXPANSION = 200  # real snapshots shrink to a tenth or a fortieth by gzip, an empty file to a thousandth
_CHUNK = 1 << 12
_DEVICES = 128  # torch is compiled for 120
_STREAMS = 1024  # of one device; a recording with ten is rare
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
    except Exception as error:
        raise unreadable(name, error) from error


def unreadable(name: str, error: Exception) -> ValueError:
    """Return the error of a file that is no snapshot, from the error that reading it ended in."""
    if isinstance(error, ValueError):
        return ValueError(f"{name} is not a snapshot that memexplore can read: {error}")
    return ValueError(f"{name} is not a snapshot that memexplore can read: it contradicts itself ({error!r:.200})")


def _decompress(data: bytes) -> bytes:
    """Return the content of a gzip file.

    Raises ValueError if it is damaged, or larger than a snapshot of its compressed size can be.
    """
    left = len(data) * _EXPANSION + 4 * _MIB
    parts = []
    position, size = 0, _CHUNK
    stream = zlib.decompressobj(wbits=31)
    try:
        while position < len(data):
            # A member copies what follows it in its chunk, so the first chunk of a member is small.
            chunk = data[position : position + size]
            position, size = position + len(chunk), 2 * size
            parts.append(stream.decompress(chunk, left + 1))
            left -= len(parts[-1])
            if left < 0:
                raise ValueError("it unpacks to more than a snapshot of its length can hold")
            if stream.eof:
                position -= len(stream.unused_data)
                while data[position : position + 1] == b"\0":
                    position += 1
                if position < len(data):
                    stream, size = zlib.decompressobj(wbits=31), _CHUNK
    except zlib.error as error:
        raise ValueError(f"its compression is damaged ({error})") from None
    if not stream.eof:
        raise ValueError("it ends early")
    return b"".join(parts)


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
    if len(traces) > _DEVICES:
        raise ValueError(f"it has traces of {len(traces)} devices; no machine has more than {_DEVICES}")
    rows = [_rows(plain, trace) for trace in traces]
    # Only now, because `_rows` adds the events that were read one by one.
    columns = [np.frombuffer(plain.columns[name], dtype=np.int64) for name in EVENT_COLUMNS]
    codes = np.array([*(_ACTIONS.get(name, -1) for name in plain.actions), -1])
    segments = _segments(plain, root["segments"])
    expandable = any(segment.expandable for of_device in segments.values() for segment in of_device)
    settings = _settings(root.get("allocator_settings"), expandable)
    devices = []
    for device in range(max([len(rows) - 1, *segments]) + 1):
        of_device = rows[device] if device < len(rows) else np.empty(0, dtype=np.int64)
        mine = sorted(segments[device], key=lambda segment: segment.address) if device in segments else []
        if any(left.address + left.size > right.address for left, right in pairwise(mine)):
            raise ValueError("two segments overlap")
        if not len(of_device) and not mine:
            continue
        action, address, size, stream, time, stack = (column[of_device] for column in columns)
        action = codes[action]
        supported = action >= 0
        _check_events(action[supported], address[supported], size[supported])
        numbers, stacks = _stacks(plain, stack[supported], mine)
        if len(set(stream[supported].tolist()) | {segment.stream for segment in mine}) > _STREAMS:
            raise ValueError(f"a device has more than {_STREAMS} streams")
        devices.append(
            Recorded(
                device,
                action[supported],
                address[supported],
                size[supported],
                stream[supported],
                time[supported],
                numbers[stack[supported]],
                tuple(_renumbered(segment, numbers) for segment in mine),
                settings,
                next((plain.device_free[row] for row in of_device.tolist() if row in plain.device_free), None),
                stacks,
            )
        )
    _check_shared_stacks(plain, devices)
    return devices


def _stacks(
    plain: PlainData, used: NDArray[np.int64], segments: list[RecordedSegment]
) -> tuple[NDArray[np.int64], tuple[list[Any], ...]]:
    """Return the stacks of one device, and their numbers by the number in the file; the last number is that of -1."""
    distinct = set(np.unique(used).tolist()) | {block.stack for segment in segments for block in segment.blocks}
    of_device = sorted(distinct - {-1})
    numbers = np.full(len(plain.stacks) + 1, -1)
    numbers[of_device] = np.arange(len(of_device))
    return numbers, tuple(plain.stacks[number] for number in of_device)


def _renumbered(segment: RecordedSegment, numbers: NDArray[np.int64]) -> RecordedSegment:
    """Return a segment whose blocks have the stack numbers of their device."""
    blocks = segment.blocks
    stacks = numbers[[block.stack for block in blocks]].tolist() if blocks else []
    return segment._replace(
        blocks=tuple(block._replace(stack=stack) for block, stack in zip(blocks, stacks, strict=True))
    )


def _check_shared_stacks(plain: PlainData, devices: list[Recorded]) -> None:
    """Refuse a file in which many devices have the same long stacks: their frames are read once for each device."""
    frames = sum(map(len, plain.stacks))
    if sum(len(stack) for recorded in devices for stack in recorded.stacks) > 16 * frames + 100_000:
        raise ValueError("it has the same stacks for more devices than a machine has")


def _check_events(action: NDArray[np.int64], address: NDArray[np.int64], size: NDArray[np.int64]) -> None:
    with_address = (action != Action.OOM) & (action != Action.SNAPSHOT)
    if (size < 0).any() or (size >= _LIMIT).any() or (with_address & ((address < 0) | (address >= _LIMIT))).any():
        raise ValueError("an event has a size or an address that no device has")
    if size.sum(dtype=np.float64) >= _LIMIT:  # sums of columns are 64 bits long
        raise ValueError("its events have sizes that no device has")


def _rows(plain: PlainData, trace: list[Any]) -> NDArray[np.int64]:
    """Return the rows of a trace; events that are still dictionaries are added to the columns."""
    if not set(map(type, trace)) <= {int, dict}:
        raise ValueError("a trace has an entry that is not an event")
    for index, event in enumerate(trace):
        if type(event) is dict:
            trace[index] = plain.add_event(event)
    if trace and not 0 <= min(trace) <= max(trace) < len(plain.columns["action"]):
        raise ValueError("a trace has an entry that is not an event")
    return np.array(trace, dtype=np.int64)


def _segments(plain: PlainData, entries: list[Any]) -> dict[int, list[RecordedSegment]]:
    """Return the segments of each device."""
    segments = defaultdict(list)
    seen = set()
    total = 0
    for entry in entries:
        if type(entry) is not dict or type(entry.get("blocks")) is not list:
            raise ValueError("a segment is a dictionary with a list of blocks")
        blocks = entry["blocks"]
        if id(blocks) in seen:
            raise ValueError("it holds one list of blocks several times")
        seen.add(id(blocks))
        pool = entry.get("segment_pool_id", (0, 0))
        if type(pool) not in (tuple, list) or len(pool) != 2:
            raise ValueError(f"a segment_pool_id is a pair of numbers, not {shown(pool)}")
        address = _whole_number(entry, "address")
        segment = RecordedSegment(
            address,
            _whole_number(entry, "total_size"),
            _whole_number(entry, "stream", 0),
            entry.get("is_expandable") is True,
            (_number(pool[0]), _number(pool[1])),
            tuple(_blocks(plain, address, blocks)),
        )
        if not segment.size:
            raise ValueError("a segment has 0 bytes")
        end = address
        for block in segment.blocks:
            if block.address < end:
                raise ValueError("two blocks of a segment overlap")
            end = block.address + block.size
        if end > address + segment.size:
            raise ValueError("a block reaches beyond its segment")
        total += segment.size
        device = _whole_number(entry, "device", 0)
        if not 0 <= device < _DEVICES:
            raise ValueError(f"a device has a number from 0 to {_DEVICES - 1}, not {device}")
        segments[device].append(segment)
    if total >= _LIMIT:
        raise ValueError("its segments have sizes that no device has")
    return segments


def _blocks(plain: PlainData, address: int, blocks: list[Any]) -> list[RecordedBlock]:
    result = []
    for block in blocks:
        if type(block) is not dict:
            raise ValueError(f"a block is a dictionary, not {shown(block)}")
        state = block.get("state")
        if type(state) is not str or state not in _STATES:
            raise ValueError(f"a block has an unknown state {shown(state)}")
        size = _whole_number(block, "size")
        if not size:
            raise ValueError("a block has 0 bytes")
        # Before torch 2.1 a block had no address field: each block follows the one before.
        address = _whole_number(block, "address", address)
        requested = _whole_number(block, "requested_size", size)
        result.append(RecordedBlock(address, size, requested, _STATES[state], plain.stack_number(block.get("frames"))))
        address += size
    return result


def _whole_number(entry: dict[Any, Any], name: str, missing: int | None = None) -> int:
    """Return a field of a segment or block; `missing` is its value in files without it."""
    if name not in entry and missing is None:
        raise ValueError(f"the field {name!r} is missing")
    return _number(entry.get(name, missing))


def _number(value: object) -> int:
    if type(value) is not int or not 0 <= value < _LIMIT:
        raise ValueError(f"an address or a size is a whole number of bytes, not {shown(value)}")
    return value


def _settings(entries: object, expandable: bool) -> Settings:
    """Return the settings that a snapshot records (since torch 2.2); PyTorch's defaults for the others."""
    if type(entries) is not dict:
        return Settings(expandable_segments=expandable)
    texts = [entries.get(name) for name in ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF")]
    try:
        settings = Settings.parse(next((text for text in texts if type(text) is str and text), ""))
    except ValueError:
        settings = Settings()  # options of other releases; the fields below hold those that matter
    changes: dict[str, Any] = {"expandable_segments": entries.get("expandable_segments") is True or expandable}
    limit = entries.get("max_split_size", -1)
    if type(limit) is int and limit > 0:
        changes["max_split_size"] = min(limit, UNLIMITED)
    threshold = entries.get("garbage_collection_threshold", 0.0)
    if type(threshold) is float and threshold > 0:
        changes["garbage_collection_threshold"] = threshold
    divisions = entries.get("roundup_power2_divisions")
    if type(divisions) is dict:
        table = [divisions.get(str(1 << index), 0) for index in range(len(settings.roundup_power2_divisions))]
        if not all(type(division) is int and 0 <= division < 1 << 32 for division in table):
            raise ValueError("roundup_power2_divisions has an entry that is not a whole number")
        if any(table):
            changes["roundup_power2_divisions"] = tuple(table)
    return dataclasses.replace(settings, **changes)
