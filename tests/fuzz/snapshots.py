"""Snapshot files that are damaged, changed or hostile: a number goes in, the bytes of a file come out."""

from __future__ import annotations

import copy
import functools
import gzip
import pickle
import random
import struct
from typing import Any

from memexplore.snapshot import as_snapshot
from tests import sample_tapes
from tests.snapshot.snapshot_files import BASE, LINE, MIB, NATIVE, STEP, block, event, segment, small_snapshot

OPCODES = b"jh\x94}(KMJ\x8au\x8c]eas\x95.qrtp\x85\x86\x87NG\x88\x89)IVFXBCcRb0:12"
INTEGERS = (0, 1, -1, 2, 511, 512, 4096, 4097, 1 << 20, 1 << 31, 1 << 32, 1 << 59, 1 << 60, 1 << 62, 1 << 63, 1 << 64)
SCALARS: tuple[Any, ...] = (
    *INTEGERS,
    -(1 << 63),
    (1 << 127) - 1,
    None,
    True,
    False,
    0.0,
    0.5,
    1e308,
    float("nan"),
    float("inf"),
    "",
    "a",
    "\ud800",
    "\x1b[2J\n",
    "</script>",
    "a[" * 50,
    "segment_map",
    "segment_unmap",
    "free_completed",
    "oom",
    "snapshot",
    "active_pending_free",
    "inactive",
    "max_split_size_mb:20,roundup_power2_divisions:[256:1,>:8]",
    "expandable_segments:True,garbage_collection_threshold:0.6",
    b"",
    b"\xff\xfe",
)


LARGE = 4
"""The number of the content that has steps, layers and stacks; its file has 20 kB, the others have 1 kB."""


@functools.cache
def contents() -> tuple[Any, ...]:
    """Return the contents of snapshots that can be read: small ones, each with something that the others lack."""
    frames = [LINE, STEP, NATIVE, {"name": "_call_impl", "filename": "/e/torch/nn/modules/module.py", "line": 7}]
    expandable = segment(BASE, 4 * MIB, block(BASE, 1024, 700), is_expandable=True, segment_pool_id=(1, 2))
    small = small_snapshot()
    trace = small["device_traces"][0]
    trace += [event("free_requested", BASE, 700), event("free_completed", BASE, 700)]
    trace += [event("alloc", BASE + size, size, frames=frames[: size // 512]) for size in (512, 1024, 2048)]
    trace += [event("oom", -1, 1 << 40, device_free=5 * MIB), event("snapshot", 0, 0)]
    settings = {
        "PYTORCH_CUDA_ALLOC_CONF": "max_split_size_mb:64,expandable_segments:True",
        "max_split_size": 64 * MIB,
        "garbage_collection_threshold": 0.5,
        "expandable_segments": True,
        "roundup_power2_divisions": {str(1 << index): index % 2 * 4 for index in range(16)},
    }
    mapped = [event("segment_map", BASE + at * 2 * MIB, 2 * MIB, stream=at % 2) for at in range(6)]
    mapped += [event("alloc", BASE + 2 * MIB, 3 * MIB), event("segment_unmap", BASE + 6 * MIB, 2 * MIB)]
    late = {"segments": [expandable], "device_traces": [[], mapped[3:]], "allocator_settings": settings}
    made = [as_snapshot(tape) for tape in (sample_tapes.training_tape(2, 1, 16, 1), sample_tapes.oom_tape())]
    return (small, late, {"segments": [], "device_traces": [mapped]}, [expandable], *made)


@functools.cache
def files() -> tuple[bytes, ...]:
    """Return the files that are damaged."""
    return tuple(pickle.dumps(content, protocol) for content in contents() for protocol in (0, 2, 4))


def _new_content(rng: random.Random) -> Any:
    """Return the content of a snapshot that may be changed; unlike a deep copy this takes no time."""
    return pickle.loads(files()[3 * _content(rng) + 2])


def _content(rng: random.Random) -> int:
    """Return the number of a content; the large one is one of 30."""
    return LARGE if not rng.randrange(30) else rng.choice([at for at in range(len(contents())) if at != LARGE])


def damaged(number: int) -> bytes:
    """Return a snapshot file with some bytes changed, removed, repeated or taken from another one."""
    rng = random.Random(number)
    data = bytearray(files()[3 * _content(rng) + rng.randrange(3)])
    packed = rng.random() < 0.05
    if packed:
        data = bytearray(gzip.compress(data, 1, mtime=0))
    damage(data, rng, OPCODES, files())
    return bytes(data) if packed or rng.random() < 0.95 else gzip.compress(data, 1, mtime=0)


def damage(data: bytearray, rng: random.Random, favourites: bytes, sources: tuple[bytes, ...]) -> None:
    """Change 1 to 8 places of a file: to any byte or a favourite, or to a piece of another file."""
    for _ in range(rng.choice((1, 1, 1, 2, 3, 8))):
        at = rng.randrange(len(data) + 1)
        length = rng.choice((1, 1, 2, 4, 8, 50))
        match rng.randrange(7):
            case 0:
                data[at : at + 1] = bytes([rng.randrange(256)])
            case 1:
                data[at : at + 1] = bytes([rng.choice(favourites)])
            case 2:
                data[at:at] = rng.randbytes(length)
            case 3:
                del data[at : at + length]
            case 4:
                data[at:at] = data[at : at + length] * rng.choice((1, 2, 30))
            case 5:
                source = rng.choice(sources)
                start = rng.randrange(len(source))
                data[at : at + length] = source[start : start + length]
            case _:
                data[at : at + 1] = bytes([data[at] ^ 1 << rng.randrange(8)]) if at < len(data) else b"."


def changed(number: int) -> bytes:
    """Return a snapshot whose structure was changed in some places, as a pickle of protocol 2 to 4."""
    rng = random.Random(number)
    content = _new_content(rng)
    for _ in range(rng.choice((1, 1, 2, 3, 6))):
        _change(content, rng)
    return pickle.dumps(content, rng.choice((2, 3, 4, 4, 4)))


def _change(content: Any, rng: random.Random) -> None:
    """Change one entry of a list or dictionary at a random depth."""
    holder, key = place_in(content, rng)
    if holder is None:
        return
    match rng.randrange(8):
        case 0:
            del holder[key]
        case 1 if type(holder) is list:
            holder[key:key] = [copy.deepcopy(holder[key]) for _ in range(rng.choice((1, 2, 20)))]
        case 2 if type(holder) is list:
            rng.shuffle(holder)
        case 3:
            other, name = place_in(content, rng)
            if other is not None:
                holder[key] = other[name]  # shared, perhaps with what holds it
        case 4 if type(holder) is dict:
            holder[rng.choice(SCALARS[:30])] = holder[key]
        case 5 if type(holder[key]) is int:
            holder[key] += rng.choice((-1, 1, 512, -512, MIB, 1 << 59))
        case 6:
            holder[key] = rng.choice(([holder[key]], (holder[key],), {"a": holder[key]}, [], {}, ()))
        case _:
            holder[key] = rng.choice(SCALARS)


def place_in(content: Any, rng: random.Random) -> tuple[Any, Any]:
    """Return a list or dictionary somewhere inside, and one of its keys; None without one."""
    place: tuple[Any, Any] = (None, None)
    current = content
    while type(current) in (list, dict) and current and (place[0] is None or rng.random() < 0.85):
        key = rng.randrange(len(current)) if type(current) is list else rng.choice(list(current))
        place, current = (current, key), current[key]
    return place


PLACE = "@@%d@@"


def hostile(number: int) -> bytes:
    """Return a snapshot with 1 to 3 values that only opcodes can describe: nested, shared, endless."""
    rng = random.Random(number)
    content = _new_content(rng)
    count = rng.choice((1, 1, 2, 3))
    for index in range(count):
        holder, key = place_in(content, rng)
        if holder is not None:
            holder[key] = PLACE % index
    data = pickle.dumps(content, 4)
    for index in range(count):
        text = (PLACE % index).encode()
        data = data.replace(b"\x8c" + bytes([len(text)]) + text + b"\x94", hostile_value(rng) + b"\x94")
    return data


_SHARED = b"r\xff\xff\xff\x7f"
_AGAIN = b"j\xff\xff\xff\x7f"


def hostile_value(rng: random.Random) -> bytes:
    """Return opcodes that leave one value on the stack."""
    depth = rng.choice((3, 60, 1000, rng.randrange(1, 20_000)))
    match rng.randrange(12):
        case 0:
            return b")" + b"\x85" * depth
        case 1:
            return b")" + _SHARED + (_AGAIN + b"\x86" + _SHARED) * min(depth, 200)
        case 2:  # lists of the same list twice; a tuple takes what remains on the stack
            return b"(]" + _SHARED + (b"](" + _AGAIN * 2 + b"e" + _SHARED) * min(depth, 200) + b"t"
        case 3:
            return b"]" * min(depth, 900) + b"a" * (min(depth, 900) - 1)
        case 4:
            return b"]" + _SHARED + _AGAIN + b"a"
        case 5:
            return b"}X\x01\0\0\0a" + _SHARED + b"X\x01\0\0\0b}" + _SHARED + b"s" + b"Ns"
        case 6:
            return b"V\\ud8%02x\n" % rng.randrange(256)
        case 7:
            return b"\x8a\x10" + rng.randbytes(16)
        case 8:
            return b"G" + struct.pack(">d", rng.choice((float("nan"), float("inf"), -1e308, 5e-324)))
        case 9:
            return b"(" + b"N" * depth + b"t"
        case 10:
            text = rng.choice((b"a[", b"a,", b"\n\t", b"[[", b"1:")) * rng.choice((100, 2500, 30_000))
            return b"X" + struct.pack("<I", len(text)) + text
        case _:
            return rng.choice((b"N", b"\x88", b"K\xff", b"J\0\0\0\x80", b"C\x02ab", b"]", b"}", b"I01\n", b"F1e999\n"))


KINDS = {"damaged": damaged, "changed": changed, "hostile": hostile}


def make(number: int) -> bytes:
    """Return the file of a number: half of them damaged, the others changed or hostile."""
    return (damaged, damaged, changed, hostile)[number % 4](number)
