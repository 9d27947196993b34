"""Frees that wait for another stream: the reserved peak of a GPU that lags behind the program."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

import memexplore as mx
from memexplore.analysis.placements import summary_ranges

MIB = 1 << 20
BLOCK = 30 * MIB  # a segment of its own


def block() -> torch.Tensor:
    return torch.empty(BLOCK, dtype=torch.uint8, device="cuda")


def tape_of(wait: Callable[[torch.cuda.Stream], object], gpu: str = "T4") -> mx.Tape:
    """A block of a side stream is used by the default stream and freed; then the side stream requests another one."""
    with mx.virtual(gpu), mx.record() as recording:
        value = torch.ones(1, device="cuda")
        side = torch.cuda.Stream()
        with side:
            used = block()
        used.record_stream(torch.cuda.current_stream())
        del used
        wait(side)
        with side:
            block()
        del value
    return recording.tape


def nothing(side: torch.cuda.Stream) -> None:
    pass


def an_event(side: torch.cuda.Stream) -> None:
    event = torch.cuda.Event()
    event.record()
    event.synchronize()


def an_earlier_event(side: torch.cuda.Stream) -> None:
    torch.cuda.Event().synchronize()


def the_default_stream_through_the_side_stream(side: torch.cuda.Stream) -> None:
    side.wait_stream(torch.cuda.current_stream())
    side.synchronize()


SMALL = 2 * MIB  # the segment of the value


@pytest.mark.parametrize(
    "wait",
    [
        lambda side: torch.cuda.synchronize(),
        lambda side: torch.cuda.current_stream().synchronize(),
        lambda side: torch.ones(1, device="cuda").item(),
        lambda side: torch.ones(1, device="cuda").cpu(),
        an_event,
        the_default_stream_through_the_side_stream,
    ],
)
def test_a_free_ends_when_the_program_waits_for_the_stream(wait):
    assert tape_of(wait).meta.late_reserved == BLOCK + SMALL


@pytest.mark.parametrize(
    "wait",
    [
        nothing,
        an_earlier_event,
        lambda side: side.synchronize(),
        lambda side: torch.ones(1, device="cuda").to("cpu", non_blocking=True),
    ],
)
def test_a_free_may_end_late_if_the_program_waits_for_no_work_of_the_stream(wait):
    tape = tape_of(wait)
    assert tape.meta.late_reserved == 2 * BLOCK + SMALL
    assert any("up to 62.0 MiB instead of 32.0 MiB" in note for note in tape.meta.notes)
    assert summary_ranges(tape)["peak_reserved_range"] == [BLOCK + SMALL, 2 * BLOCK + SMALL]


def test_a_use_on_the_own_stream_waits_for_nothing():
    with mx.virtual("T4"), mx.record() as recording:
        used = block()
        used.record_stream(torch.cuda.current_stream())
        del used
    assert recording.tape.meta.late_reserved is None


def test_frees_of_several_uses_end_with_the_last_stream():
    with mx.virtual("T4"), mx.record() as recording:
        first, second = torch.cuda.Stream(), torch.cuda.Stream()
        used = block()
        used.record_stream(first)
        used.record_stream(second)
        del used
        first.synchronize()
        block()
        second.synchronize()
        block()
    assert recording.tape.meta.late_reserved == 2 * BLOCK


def test_a_request_that_fails_waits_for_all_streams():
    # 62 MiB do not fit; the allocator waits for every stream, releases the free segment and tries again.
    assert tape_of(nothing, gpu="50MiB").meta.late_reserved == BLOCK + SMALL


def test_a_file_keeps_the_late_peak(tmp_path):
    tape = tape_of(nothing)
    tape.save(tmp_path / "tape.parquet")
    assert mx.Tape.load(tmp_path / "tape.parquet").meta.late_reserved == 2 * BLOCK + SMALL
