"""Sizes of blocks allocated before a recording begins, which their neighbours no longer show."""

import torch

from memexplore.analysis import curves
from memexplore.recorder.recording import record
from memexplore.run.machine import virtual
from memexplore.snapshot.history import initial_row_count

MIB = 1024**2


def at_start(make) -> tuple[int, int]:
    """Allocated bytes at the start of a recording, by the tape and by the allocator."""
    with virtual("T4"):
        kept = make()
        allocated = torch.cuda.memory_allocated()
        with record() as recording:
            kept.add_(1)
    tape = recording.tape
    return int(curves.curve(tape)[initial_row_count(tape) - 1]), allocated


def test_a_remainder_absorbed_before_its_neighbour_was_freed():
    def make():
        # One segment of 40 MiB, all of it free again.
        whole = torch.empty(40 * MIB, dtype=torch.uint8, device="cuda")
        del whole
        first = torch.empty(20 * MIB, dtype=torch.uint8, device="cuda")
        second = torch.empty(20 * MIB, dtype=torch.uint8, device="cuda")
        del first
        # 19.5 MiB take the 20 MiB in front of the second block: 0.5 MiB are too small to split off.
        kept = torch.empty(19 * MIB + MIB // 2, dtype=torch.uint8, device="cuda")
        del second
        return kept

    on_tape, allocated = at_start(make)
    assert on_tape == allocated == 20 * MIB


def test_a_block_before_a_small_free_range_absorbed_nothing():
    def make():
        # One segment of 20 MiB; a free range of 512 KiB between two blocks was split off when there was more.
        whole = torch.empty(20 * MIB, dtype=torch.uint8, device="cuda")
        del whole
        kept = torch.empty(15 * MIB, dtype=torch.uint8, device="cuda")
        gap = torch.empty(1536 * 1024, dtype=torch.uint8, device="cuda")
        make.behind = torch.empty(3 * MIB, dtype=torch.uint8, device="cuda")
        del gap
        return kept

    # 15 + 3 MiB and the 0.5 MiB behind them, which the last block absorbed: the range of 1.5 MiB in between is free.
    on_tape, allocated = at_start(make)
    assert on_tape == allocated == 18 * MIB + MIB // 2
