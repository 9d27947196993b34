"""Memory pools of streams on a virtual GPU: which requests can reuse which blocks, and the stream of each row."""

from __future__ import annotations

import threading

import pytest
import torch

import memexplore as mx
from memexplore.tape import Action

MIB = 1 << 20
LARGE = 30 * MIB  # a request from 10 MiB on has a segment of its own


def block(size: int = LARGE) -> torch.Tensor:
    return torch.empty(size, dtype=torch.uint8, device="cuda")


def streams_of(tape: mx.Tape, action: Action) -> list[int]:
    return tape.stream[tape.action == action].tolist()


def test_a_stream_does_not_reuse_the_free_block_of_another():
    with mx.virtual("T4"):
        block()
        with torch.cuda.stream(torch.cuda.Stream()):
            block()
        assert torch.cuda.memory_reserved() == 2 * LARGE


def test_a_block_is_free_for_the_stream_that_requested_it_wherever_it_died():
    with mx.virtual("T4"):
        side = torch.cuda.Stream()
        with torch.cuda.stream(side):
            kept = block()
        del kept
        with torch.cuda.stream(side):
            block()
        assert torch.cuda.memory_reserved() == LARGE


def test_rows_have_the_stream_of_their_block():
    with mx.virtual("T4"), mx.record() as recording:
        with torch.cuda.stream(torch.cuda.Stream()):
            kept = block()
        del kept
        block()
    tape = recording.tape
    assert streams_of(tape, Action.ALLOC) == [1, 0]
    assert streams_of(tape, Action.SEGMENT_ALLOC) == [1, 0]
    assert streams_of(tape, Action.FREE_REQUESTED) == streams_of(tape, Action.FREE_COMPLETED) == [1, 0]


def test_blocks_older_than_a_recording_have_their_stream():
    with mx.virtual("T4"):
        with torch.cuda.stream(torch.cuda.Stream()):
            kept = block()
        with mx.record() as recording:
            pass
        assert streams_of(recording.tape, Action.PREEXISTING) == [1]
        del kept


def test_a_request_that_does_not_fit_has_its_stream():
    with mx.virtual("T4"), mx.record() as recording, pytest.raises(torch.OutOfMemoryError):
        torch.cuda.set_stream(torch.cuda.Stream())
        block(1 << 40)
    assert streams_of(recording.tape, Action.OOM) == [1]


def test_the_same_code_has_the_same_streams_on_the_next_virtual_gpu():
    tapes = []
    for _ in range(2):
        with mx.virtual("T4"), mx.record() as recording, torch.cuda.stream(torch.cuda.Stream()):
            block()
        tapes.append(recording.tape)
    assert tapes[0].stream.tolist() == tapes[1].stream.tolist()


def test_streams_of_a_priority_repeat_after_32():
    with mx.virtual("T4"):
        made = [torch.cuda.Stream() for _ in range(33)]
        assert made[32] == made[0] != made[31]
        assert torch.cuda.Stream(priority=-1) not in made


def test_backward_runs_on_the_stream_of_the_forward():
    with mx.virtual("T4"), mx.record() as recording:
        weight = torch.ones(LARGE // 4, device="cuda", requires_grad=True)
        with torch.cuda.stream(torch.cuda.Stream()):
            loss = (weight * 2).sum()
        loss.backward()
    # The weight; its product, the sum and the sum's scratch memory; the gradient that flows back; then `.grad`.
    tape = recording.tape
    gradient = tape.stream[(tape.action == Action.ALLOC) & (tape.size == LARGE)].tolist()
    assert gradient == [0, 1, 1]


def test_backward_inside_of_a_stream_leaves_nodes_of_the_default_stream_there():
    with mx.virtual("T4"), mx.record() as recording:
        weight = torch.ones(LARGE // 4, device="cuda", requires_grad=True)
        loss = (weight * 2).sum()
        with torch.cuda.stream(torch.cuda.Stream()):
            loss.backward(torch.ones((), device="cuda"))
    tape = recording.tape
    assert tape.stream[(tape.action == Action.ALLOC) & (tape.size == LARGE)].tolist() == [0, 0, 0]


def test_a_hook_can_choose_a_stream_for_its_requests():
    with mx.virtual("T4"):
        side, seen = torch.cuda.Stream(), []

        def hook(gradient: torch.Tensor) -> None:
            with torch.cuda.stream(side):
                seen.append(torch.cuda.current_stream() == side)
            seen.append(torch.cuda.current_stream() == torch.cuda.default_stream())

        weight = torch.ones(4, device="cuda", requires_grad=True)
        weight.register_hook(hook)
        (weight * 2).sum().backward()
        assert seen == [True, True]


def test_a_stream_is_a_context_and_is_left_after_an_error():
    with mx.virtual("T4"):
        side = torch.cuda.Stream()
        with pytest.raises(KeyError), side:
            assert torch.cuda.current_stream() == side
            raise KeyError
        assert torch.cuda.current_stream() == torch.cuda.default_stream()


def test_another_thread_begins_on_the_default_stream():
    with mx.virtual("T4"):
        torch.cuda.set_stream(torch.cuda.Stream())
        seen: list[bool] = []
        thread = threading.Thread(
            target=lambda: seen.append(torch.cuda.current_stream() == torch.cuda.default_stream())
        )
        thread.start()
        thread.join()
        assert seen == [True]


def test_a_stream_that_was_left_on_is_not_current_on_the_next_virtual_gpu():
    with mx.virtual("T4"):
        torch.cuda.set_stream(torch.cuda.Stream())
    with mx.virtual("T4"):
        assert torch.cuda.current_stream() == torch.cuda.default_stream()


def test_each_stream_has_a_cublas_workspace():
    # Until torch 2.14 a handle keeps one of 8 519 680 bytes for each stream: 2 * 4 MiB + 8 * 16 KiB.
    with mx.virtual("T4", release="2.13"):
        matrix = torch.ones(64, 64, device="cuda")
        before = torch.cuda.memory_allocated()
        _ = matrix @ matrix
        with torch.cuda.stream(torch.cuda.Stream()):
            _ = matrix @ matrix
        assert torch.cuda.memory_allocated() - before == 2 * 8_519_680 + 64 * 64 * 4  # and the product in `_`
