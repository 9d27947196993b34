"""A value of a wrong kind in any field of a snapshot is refused before it is hashed, compared or shown."""

from __future__ import annotations

import copy
import pickle
from pathlib import Path
from typing import Any

import pytest

from memexplore import snapshot
from memexplore.analysis.growth import growth
from memexplore.page import report
from memexplore.tape import Action, Meta, Source, Tape
from tests.fuzz import growing
from tests.snapshot.snapshot_files import BASE, LINE, MIB, block, event, load_one, segment, small_snapshot, written

AGAIN = b"j\xff\xff\xff\x7f"
SHARE = b"r\xff\xff\xff\x7f"

VALUES = {
    # Hashing or comparing it needs a C stack of 7 000 frames: the process ended with SIGSEGV.
    "tuples 7000 deep": b")" + b"\x85" * 7000,
    # 2**60 paths lead to the innermost tuple: hash and repr took for ever.
    "tuples of the same tuple twice": b")" + SHARE + (AGAIN + AGAIN + b"\x86" + SHARE) * 60,
    "lists of the same list twice": b"(]" + SHARE + (b"](" + AGAIN * 2 + b"e" + SHARE) * 60 + b"t",
    "a list inside itself": b"]" + SHARE + AGAIN + b"a",
    "a dictionary": b"}",
    "an empty list": b"]",
    "half a surrogate pair": b"V\\udc80\n",
    "127 bits": b"\x8a\x10" + b"\xff" * 15 + b"\x7f",
    "not a number": b"G\x7f\xf8\0\0\0\0\0\0",
    "True": b"\x88",
    "bytes": b"C\x03abc",
    "None": b"N",
}
FIELDS: list[tuple[Any, ...]] = [
    *(("segments", 0, name) for name in ("blocks", "address", "total_size", "stream", "segment_pool_id", "device")),
    *(("segments", 0, "blocks", 0, name) for name in ("address", "size", "requested_size", "state", "frames")),
    *(
        ("device_traces", 0, 1, name)
        for name in ("action", "addr", "size", "stream", "time_us", "frames", "device_free")
    ),
    *(("device_traces", 0, 1, "frames", 0, name) for name in ("name", "filename", "line")),
    *(("allocator_settings", name) for name in ("PYTORCH_CUDA_ALLOC_CONF", "max_split_size", "expandable_segments")),
    *(("allocator_settings", name) for name in ("garbage_collection_threshold", "roundup_power2_divisions")),
    ("allocator_settings", "roundup_power2_divisions", "1"),
    ("segments",),
    ("segments", 0),
    ("segments", 0, "blocks", 0),
    ("segments", 0, "segment_pool_id", 0),
    ("device_traces",),
    ("device_traces", 0),
    ("device_traces", 0, 1),
    ("device_traces", 0, 1, "frames", 0),
    ("device_traces", 0, 1, "compile_context"),
    ("allocator_settings",),
    ("external_annotations",),
]


@pytest.mark.parametrize("value", VALUES.values(), ids=VALUES.keys())
@pytest.mark.parametrize("field", FIELDS, ids=lambda field: ".".join(map(str, field)))
def test_a_value_of_a_wrong_kind_is_read_or_refused_with_one_sentence(
    tmp_path: Path, field: tuple[Any, ...], value: bytes
) -> None:
    file = tmp_path / "snapshot.pickle"
    file.write_bytes(_with(field, value))
    try:
        tapes = snapshot.load(file)
        snapshot.verify(file)
    except ValueError as error:
        assert "is not a snapshot that memexplore can read: " in str(error)
        assert str(error).isprintable()
        # No error of Python's own says what the field must be.
        assert isinstance(error.__cause__, ValueError)
    else:
        for tape in tapes.values():
            tape.to_pandas()


def _with(field: tuple[Any, ...], value: bytes) -> bytes:
    """A snapshot with opcodes in place of a field."""
    content = copy.deepcopy(small_snapshot() | {"allocator_settings": {"roundup_power2_divisions": {}}})
    content["segments"][0]["segment_pool_id"] = [0, 0]
    holder: Any = content
    for key in field[:-1]:
        holder = holder[key]
    place = "in place of this"
    holder[field[-1]] = place
    text = b"\x8c" + bytes([len(place)]) + place.encode() + b"\x94"
    data = pickle.dumps(content, 4)
    assert data.count(text) == 1
    return data.replace(text, value + b"\x94")


REFUSED = {
    "an event with 12 000 fields": ("one_event_with_many_items", None),
    "1 000 devices": ("traces_of_many_devices", "no machine has more than 128"),
    "a stream for each request": ("more_streams", "more than 1024 streams"),
    "segments at one place": ("segments_at_one_place", "two segments overlap"),
    "keys with one hash": ("colliding_keys", "no dictionary with the key 2305843009213693951"),
    "memo entries with one hash": ("colliding_memo", "a memo entry without a number"),
    "100 000 marks": ("marks", "nested deeper than a snapshot"),
    "100 bytes from each of gzip": ("gzip_of_nothing", "unpacks to more than"),
}


@pytest.mark.parametrize(("name", "message"), REFUSED.values(), ids=REFUSED.keys())
def test_a_structure_that_no_recording_has_is_refused(tmp_path: Path, name: str, message: str | None) -> None:
    file = tmp_path / "snapshot"
    file.write_bytes(growing.STRUCTURES[name](100_000))
    if message is None:
        assert len(load_one(file)) == 1
        return
    with pytest.raises(ValueError, match=message):
        snapshot.load(file)


def test_names_are_one_printable_line_of_bounded_length(tmp_path: Path) -> None:
    # A terminal would run the escape sequence, and UTF-8 cannot encode half a surrogate pair.
    frame = LINE | {"filename": "/home/\udc80/\x1b[2J\nmodel.py", "name": "f" * 10_000}
    content = {"segments": [], "device_traces": [[event("alloc", BASE, 512, frames=[frame])]]}
    tape = load_one(written(tmp_path, content))
    [[shown]] = tape.stacks
    assert shown.filename == "/home/�/�[2J�model.py"
    assert len(shown.function) == 4096
    assert "model.py" in report.html(tape).encode().decode()


def test_a_stack_of_thousands_of_frames_has_a_short_tooltip(tmp_path: Path) -> None:
    frames = [LINE | {"line": number} for number in range(2000)]
    tape = load_one(written(tmp_path, {"segments": [], "device_traces": [[event("alloc", BASE, 512, frames=frames)]]}))
    # The tooltip has the 60 innermost frames.
    assert "model.py:59 forward" in report.html(tape)
    assert "model.py:60 forward" not in report.html(tape)


def test_divisions_that_are_not_numbers_are_refused(tmp_path: Path) -> None:
    # True is 1 in Python, but "1:True" is not an allocator setting: showing the tape failed.
    content = small_snapshot() | {"allocator_settings": {"roundup_power2_divisions": {"1": True}}}
    with pytest.raises(ValueError, match="roundup_power2_divisions has an entry that is not a whole number"):
        snapshot.load(written(tmp_path, content))


def test_a_split_size_beyond_any_memory_is_no_limit(tmp_path: Path) -> None:
    content = small_snapshot() | {"allocator_settings": {"max_split_size": (1 << 127) - 1}}
    assert load_one(written(tmp_path, content)).meta.settings == ""


def test_an_expandable_segment_without_memory_is_refused(tmp_path: Path) -> None:
    # restore() looked at the first block of the segment: IndexError.
    content = {"segments": [segment(BASE, 0, is_expandable=True)]}
    with pytest.raises(ValueError, match="a segment has 0 bytes"):
        snapshot.load(written(tmp_path, content))


def test_a_second_segment_at_an_address_replaces_the_first(tmp_path: Path) -> None:
    # block_sizes() kept the end of the first one: IndexError.
    trace = [event("segment_alloc", BASE, size * MIB) for size in (40, 20)]
    trace += [event("segment_free", BASE, 20 * MIB), event("alloc", BASE, 19 * MIB)]
    tape = load_one(written(tmp_path, {"segments": [], "device_traces": [trace]}))
    assert tape.peak() == (19 * MIB, 3)


def test_sizes_whose_sum_exceeds_64_bits_are_refused(tmp_path: Path) -> None:
    trace = [event("alloc", BASE, 1 << 59) for _ in range(4)]
    with pytest.raises(ValueError, match="sizes that no device has"):
        snapshot.load(written(tmp_path, {"segments": [], "device_traces": [trace]}))


def test_times_beyond_any_clock_are_no_times(tmp_path: Path) -> None:
    # 2**62 microseconds are 2**72 nanoseconds.
    trace = [event("alloc", BASE + number * 512, 512, time_us=number << 62) for number in range(2)]
    tape = load_one(written(tmp_path, {"segments": [], "device_traces": [trace]}))
    assert tape.time.tolist() == [0, 1]


def test_a_block_of_0_bytes_is_refused(tmp_path: Path) -> None:
    content = {"segments": [segment(BASE, 2 * MIB, block(BASE, 0, 700), block(BASE, 0, 700))]}
    with pytest.raises(ValueError, match="a block has 0 bytes"):
        snapshot.load(written(tmp_path, content))


def test_thousands_of_steps_are_compared_by_a_hundred_of_them() -> None:
    # Each step allocates 10 bytes: step 2 ends with 20 bytes, step 1000 with 10 000.
    rows = {"address": range(0, 512_000, 512), "size": [10] * 1000, "step": range(1, 1001)}
    table = growth(Tape.from_columns(rows, meta=Meta(Source.MEASURED, "cpu")))
    assert table["grew"].tolist() == [9980]
    assert len([column for column in table.columns if isinstance(column, int)]) == 100


def test_a_thousand_segments_of_one_layer_become_as_many_bars(tmp_path: Path) -> None:
    # Bars of different segments are not joined, so looking for fewer of them never ended.
    number = 5000
    columns = {
        "action": [Action.SEGMENT_ALLOC, Action.ALLOC] * number,
        "address": [address for at in range(number) for address in (at * 4 * MIB, at * 4 * MIB)],
        "size": [4 * MIB, 3 * MIB] * number,
    }
    page = report.html(Tape.from_columns(columns, meta=Meta(Source.MEASURED, "cuda:0")))
    assert "Segments and blocks at the peak" in page
