"""Peaks that the timing of a GPU decides: frees that wait for another stream, and what a running collective holds."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist

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
    tape.save(tmp_path / "tape.tape")
    assert mx.Tape.load(tmp_path / "tape.tape").meta.late_reserved == 2 * BLOCK + SMALL


VALUE = 512  # the block of a tensor of one element


EARLY = 3 * BLOCK + 2 * VALUE
"""Peak of `held_tape` when the next collective, on another value, begins: the part and what is scattered."""


def held_tape(between: Callable[[dist.Work], object], gpu: str = "T4") -> mx.Tape:
    """Two blocks are scattered and dropped while the collective runs; later two others are requested."""
    with mx.virtual(gpu, world=2), mx.record() as recording:
        dist.init_process_group("nccl")
        value, part = torch.ones(1, device="cuda"), block()
        work = dist.reduce_scatter_tensor(part, torch.empty(2 * BLOCK, dtype=torch.uint8, device="cuda"), async_op=True)
        between(work)
        torch.empty(2 * BLOCK, dtype=torch.uint8, device="cuda")
        work.wait()
        del value
    return recording.tape


def another_collective(work: dist.Work) -> None:
    dist.all_reduce(torch.ones(1, device="cuda"))


def test_what_a_collective_holds_may_be_free_when_the_next_one_begins():
    tape = held_tape(another_collective)
    # the part, what is scattered and the later request
    assert tape.peak()[0] == 5 * BLOCK + VALUE
    assert summary_ranges(tape) == {
        "peak_allocated_range": [EARLY, 5 * BLOCK + VALUE],
        "peak_reserved_range": [3 * BLOCK + SMALL, 5 * BLOCK + SMALL],
    }
    assert any("at least 90.0 MiB instead of 150 MiB" in note for note in tape.meta.notes)


@pytest.mark.parametrize(("between", "held"), [(lambda work: None, 2 * BLOCK), (lambda work: work.wait(), 0)])
def test_a_collective_alone_holds_its_inputs_until_the_program_waits(between, held):
    tape = held_tape(between)
    assert tape.peak()[0] == 3 * BLOCK + VALUE + held
    assert tape.meta.early_allocated is None


def test_inputs_that_the_program_has_too_are_not_free_earlier():
    with mx.virtual("T4", world=2), mx.record() as recording:
        dist.init_process_group("nccl")
        part, whole = block(), torch.empty(2 * BLOCK, dtype=torch.uint8, device="cuda")
        work = dist.reduce_scatter_tensor(part, whole, async_op=True)
        another_collective(work)
        work.wait()
        del whole
    assert recording.tape.meta.early_allocated is None


def test_inputs_of_two_collectives_are_held_until_both_are_waited_for():
    with mx.virtual("T4", world=2):
        dist.init_process_group("nccl")
        whole = torch.empty(2 * BLOCK, dtype=torch.uint8, device="cuda")
        parts = block(), block()
        works = [dist.reduce_scatter_tensor(part, whole, async_op=True) for part in parts]
        del whole
        allocated = []
        for work in works:
            allocated.append(torch.cuda.memory_allocated())
            work.wait()
        assert allocated == [4 * BLOCK, 4 * BLOCK]
        assert torch.cuda.memory_allocated() == 2 * BLOCK


def scattered() -> tuple[torch.Tensor, torch.Tensor, dist.Work]:
    """A part, the two blocks that are scattered, and the running collective."""
    dist.init_process_group("nccl")
    part, whole = block(), torch.empty(2 * BLOCK, dtype=torch.uint8, device="cuda")
    return part, whole, dist.reduce_scatter_tensor(part, whole, async_op=True)


def test_a_held_tensor_is_freed_with_the_output_of_its_collective():
    with mx.virtual("T4", world=2):
        part, whole, work = scattered()
        del whole
        assert torch.cuda.memory_allocated() == 3 * BLOCK
        del part, work
        assert torch.cuda.memory_allocated() == 0


def test_a_recording_begins_with_the_held_tensors():
    with mx.virtual("T4", world=2):
        part, whole, work = scattered()
        del whole
        with mx.record() as recording:
            work.wait()
    assert recording.tape.peak()[0] == 3 * BLOCK
    del part


def test_a_storage_emptied_while_a_collective_holds_it_has_no_memory():
    with mx.virtual("T4", world=2):
        _part, whole, work = scattered()
        whole.untyped_storage().resize_(0)
        assert torch.cuda.memory_allocated() == BLOCK
        work.wait()
        assert torch.cuda.memory_allocated() == BLOCK


def test_a_file_keeps_the_early_peaks(tmp_path):
    tape = held_tape(another_collective)
    tape.save(tmp_path / "tape.tape")
    loaded = mx.Tape.load(tmp_path / "tape.tape").meta
    assert (loaded.early_allocated, loaded.early_reserved) == (EARLY, 3 * BLOCK + SMALL)
