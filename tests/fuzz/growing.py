"""Hostile structures of any size, whose cost may grow faster than the file: a name and a size go in, bytes come out."""

from __future__ import annotations

import gzip
import pickle
import random
from collections.abc import Callable
from typing import Any

from tests.snapshot.snapshot_files import BASE, LINE, MIB, block, event, segment, small_snapshot

Content = dict[str, Any]
CALL = {"name": "_call_impl", "filename": "/env/torch/nn/modules/module.py", "line": 7}


def _traces(*traces: list[Any], segments: list[Any] | None = None) -> Content:
    return {"segments": segments or [], "device_traces": list(traces)}


def _alloc(number: int, **others: Any) -> Content:
    return event("alloc", BASE + number * 4 * MIB, 2 * MIB, **others)


def _one_event_with_many_items(count: int) -> Content:
    return _traces([_alloc(0, **{f"k{number}": number for number in range(count // 8)})])


def _events_with_other_keys(count: int) -> Content:
    return _traces([_alloc(number, **{f"k{number}": "x" * (number % 64)}) for number in range(count // 60)])


def _settings_of_brackets(count: int) -> Content:
    return small_snapshot() | {"allocator_settings": {"PYTORCH_CUDA_ALLOC_CONF": "a[" * (count // 2)}}


def _settings_of_commas(count: int) -> Content:
    text = "roundup_power2_divisions:[" + "256:1," * (count // 6) + "]"
    return small_snapshot() | {"allocator_settings": {"PYTORCH_CUDA_ALLOC_CONF": text}}


def _traces_of_many_devices(count: int) -> Content:
    shared = [LINE] * (count // 4)
    number = min(count // 60, 1000)
    return _traces(*([_alloc(0, frames=shared)] for _ in range(number)))


def _segments_of_many_devices(count: int) -> Content:
    number = count // 200
    segments = [segment(BASE + at * 2 * MIB, 2 * MIB, device=at % 1000) for at in range(number)]
    return _traces(*([] for _ in range(min(number, 1000))), segments=segments)


def _segments_at_one_place(count: int) -> Content:
    return {"segments": [segment(BASE, 2 * MIB, block(BASE, 512, 1)) for _ in range(count // 200)]}


def _streams(count: int) -> Content:
    return _traces([_alloc(number, stream=number % 1000) for number in range(count // 30)])


def _more_streams(count: int) -> Content:
    return _traces([_alloc(number, stream=number) for number in range(count // 30)])


def _mapped_ranges(count: int) -> Content:
    return _traces([event("segment_map", BASE + number * 4 * MIB, 2 * MIB) for number in range(count // 30)])


def _mapped_and_unmapped(count: int) -> Content:
    number = count // 60
    mapped = [event("segment_map", BASE + at * 4 * MIB, 2 * MIB) for at in range(number)]
    return _traces(mapped + [event("segment_unmap", BASE + at * 4 * MIB, 2 * MIB) for at in reversed(range(number))])


def _segments_downwards(count: int) -> Content:
    number = count // 60
    rows = []
    for at in reversed(range(number)):
        rows += [event("segment_alloc", BASE + at * 4 * MIB, 4 * MIB), event("alloc", BASE + at * 4 * MIB, 3 * MIB)]
    return _traces(rows)


def _allocs_without_segments(count: int) -> Content:
    return _traces([event("alloc", BASE + number * 512, 512) for number in range(count // 30)])


def _frees_of_nothing(count: int) -> Content:
    kinds = ("free_requested", "free_completed")
    return _traces([event(kinds[number % 2], BASE + number // 2 * 512, 512) for number in range(count // 30)])


def _segments_freed_before_each_request(count: int) -> Content:
    rows = []
    for number in range(count // 90):
        rows += [event("segment_alloc", BASE + number * 2 * MIB, 2 * MIB)]
        rows += [event("segment_free", BASE, 2 * MIB), event("alloc", BASE + number * 2 * MIB, 512)]
    return _traces(rows)


def _requests_elsewhere(count: int) -> Content:
    """Each request is recorded at another address than the model finds."""
    number = count // 60
    segments = [event("segment_alloc", BASE + at * 2 * MIB, 2 * MIB, stream=at) for at in range(min(number, 900))]
    allocs = [event("alloc", BASE + at % 900 * 2 * MIB + MIB + at // 900 * 512, 512) for at in range(number)]
    return _traces(segments + allocs)


def _blocks(count: int) -> Content:
    blocks = [block(BASE + number * 512, 512, 100) for number in range(count // 50)]
    return {"segments": [segment(BASE, len(blocks) * 512, *blocks)]}


def _pending_blocks(count: int) -> Content:
    blocks = [block(BASE + number * 512, 512, 100, "active_pending_free") for number in range(count // 50)]
    return _traces(
        *_frees_of_nothing(count // 2)["device_traces"], segments=[segment(BASE, len(blocks) * 512, *blocks)]
    )


def _long_names(count: int) -> Content:
    """Many frames with the same long file and function."""
    filename, name = "/torch/" + "n" * (count // 3), "at::" * (count // 12)
    frames = [{"name": name, "filename": filename, "line": number} for number in range(count // 45)]
    return _traces([_alloc(number, frames=frames) for number in range(3)])


def _names_in_every_pair(count: int) -> Content:
    side = int((count / 2000) ** 0.5 * 4) + 2
    texts = ["/" + chr(97 + number % 26) * 900 + str(number) + ".py" for number in range(side)]
    frames = [{"name": one, "filename": other, "line": 1} for one in texts for other in texts]
    return _traces([_alloc(0, frames=frames)])


def _deep_stack(count: int) -> Content:
    stack = [LINE, CALL] * (count // 4)
    return _traces([_alloc(number, frames=stack[: len(stack) - number % 2]) for number in range(6)])


def _deep_calls_in_many_stacks(count: int) -> Content:
    """Stacks of many depths, whose rows alternate: pairs of stacks times the depth of calls."""
    number = max(int((count / 8) ** 0.5), 2)
    stacks = [[LINE, CALL] * (number // 2) + [LINE] * at for at in range(number)]
    rows = random.Random(count)
    return _traces([_alloc(at, frames=stacks[rows.randrange(number)]) for at in range(count // 60)])


def _depths(count: int) -> Content:
    number = max(int((count / 4) ** 0.5), 2)
    stacks = [[LINE, CALL] * at for at in range(1, number)]
    return _traces([_alloc(at, frames=stacks[at % len(stacks)]) for at in range(count // 60)])


def _parameters_replaced(count: int) -> Content:
    """Optimizer steps that allocate thousands of blocks and free as many."""
    stack = [{"name": "step", "filename": "/env/torch/optim/sgd.py", "line": 1}]
    model = [{"name": "__init__", "filename": "model.py", "line": 1}]
    number = count // 90
    rows = [_alloc(at, frames=model) for at in range(number)]
    rows += [_alloc(0, frames=[LINE, CALL]) | {"addr": 512}]
    rows += [_alloc(number + at, frames=stack) for at in range(number)]
    rows += [_alloc(at, frames=stack) | {"action": "free_completed"} for at in range(number)]
    return _traces(rows)


def _steps(count: int) -> Content:
    """Thousands of steps, each a forward, a backward and an optimizer step."""
    optimizer = [{"name": "step", "filename": "/env/torch/optim/sgd.py", "line": 1}]
    backward = [{"name": "backward", "filename": "/env/torch/_tensor.py", "line": 1}]
    rows = []
    for number in range(count // 100):
        stacks = ([LINE, CALL], backward, optimizer)
        rows += [_alloc(3 * number + at, frames=stack) for at, stack in enumerate(stacks)]
    return _traces(rows)


def _lines(count: int) -> Content:
    frames = [{"name": f"f{number}", "filename": f"m{number}.py", "line": number} for number in range(count // 60)]
    return _traces([_alloc(number, frames=[frame]) for number, frame in enumerate(frames)])


def _out_of_memory(count: int) -> Content:
    return _traces([event("oom", -1, 1 << 40, device_free=number) for number in range(count // 40)])


def _pickled(make: Callable[[int], Content]) -> Callable[[int], bytes]:
    return lambda count: pickle.dumps(make(count), 4)


def _colliding_keys(count: int) -> bytes:
    """Return a dictionary whose keys have one hash: multiples of 2**61 - 1."""
    keys = ((number * ((1 << 61) - 1)).to_bytes(16, "little") for number in range(1, count // 20))
    return b"\x80\x04}X\x08\0\0\0segments](}(" + b"".join(b"\x8a\x10" + key + b"N" for key in keys) + b"ues."


def _colliding_memo(count: int) -> bytes:
    return b"\x80\x04N" + b"".join(b"p%d\n" % (number * ((1 << 61) - 1)) for number in range(1, count // 24)) + b"."


def _memo_of_one_text(count: int) -> bytes:
    """Return texts that repeat an event's keys thousands of times, in front of events with these keys."""
    texts = b"\x8c\x06action\x94\x8c\x04addr\x94\x8c\x04size\x94" * (count // 60)
    one = b"}\x94(h\x00\x8c\x05alloc\x94h\x01M\x00\x10h\x02M\x00\x10u"
    events = b"](" + one * (count // 60) + b"e"
    return b"\x80\x04}(\x8c\x04more(" + texts + b"t\x8c\x08segments]\x8c\x0ddevice_traces]" + events + b"au."


def _gaps_in_expandable(count: int) -> Content:
    """Requests to an expandable segment of thousands of separate pages."""
    number = count // 120
    mapped = [event("segment_map", BASE + at * 40 * MIB, 20 * MIB) for at in range(number)]
    allocs = [event("alloc", BASE + at * 40 * MIB, 15 * MIB) for at in range(number)]
    rows = [row for pair in zip(mapped, allocs, strict=True) for row in pair]
    return _traces(rows) | {"allocator_settings": {"expandable_segments": True}}


def _free_pages(count: int) -> Content:
    """Requests that fit no free page of an expandable segment."""
    segments = [
        segment(
            BASE + at * 40 * MIB, 20 * MIB, block(BASE + at * 40 * MIB, 20 * MIB, 0, "inactive"), is_expandable=True
        )
        for at in range(count // 400)
    ]
    allocs = [event("alloc", BASE + (at % 1000) * 40 * MIB, 30 * MIB) for at in range(count // 60)]
    return _traces(allocs, segments=segments) | {"allocator_settings": {"expandable_segments": True}}


def _marks(count: int) -> bytes:
    return b"\x80\x04" + b"(" * count


def _gzip_members(count: int) -> bytes:
    member = gzip.compress(b"", 9, mtime=0)
    return gzip.compress(pickle.dumps(small_snapshot()), 9, mtime=0) + member * (count // len(member))


def _gzip_of_nothing(count: int) -> bytes:
    return gzip.compress(bytes(count * 100), 9, mtime=0)


def _gzip_of_events(count: int) -> bytes:
    return gzip.compress(pickle.dumps(_traces([event("alloc", BASE, 512)] * (count // 30)), 4), 9, mtime=0)


STRUCTURES: dict[str, Callable[[int], bytes]] = {
    make.__name__.strip("_"): _pickled(make)
    for make in (
        _one_event_with_many_items,
        _events_with_other_keys,
        _settings_of_brackets,
        _settings_of_commas,
        _traces_of_many_devices,
        _segments_of_many_devices,
        _segments_at_one_place,
        _streams,
        _more_streams,
        _mapped_ranges,
        _mapped_and_unmapped,
        _segments_downwards,
        _allocs_without_segments,
        _frees_of_nothing,
        _segments_freed_before_each_request,
        _requests_elsewhere,
        _blocks,
        _pending_blocks,
        _long_names,
        _names_in_every_pair,
        _deep_stack,
        _deep_calls_in_many_stacks,
        _depths,
        _parameters_replaced,
        _steps,
        _lines,
        _out_of_memory,
        _gaps_in_expandable,
        _free_pages,
    )
} | {
    make.__name__.strip("_"): make
    for make in (
        _colliding_keys,
        _colliding_memo,
        _memo_of_one_text,
        _marks,
        _gzip_members,
        _gzip_of_nothing,
        _gzip_of_events,
    )
}
