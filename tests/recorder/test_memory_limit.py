"""The limit on the memory of a process; a virtual GPU stands for the real one."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

import memexplore as mx
from memexplore.allocator.replay import replay
from memexplore.figures.scale import scale
from memexplore.hardware.catalogue import find
from memexplore.live.counters import CudaCounters, VirtualCounters
from memexplore.recorder import cuda
from memexplore.virtual_gpu.device import active

T4 = find("T4").for_release(torch.__version__.partition("+")[0])
QUARTER = T4.total // 4
DEVICE = torch.device("cuda", 0)


@pytest.fixture
def t4() -> Iterator[None]:
    with mx.virtual("T4"):
        yield


def test_a_recording_on_a_gpu_has_the_limit_as_its_capacity(t4):
    torch.cuda.set_per_process_memory_fraction(0.25)
    meta = cuda.meta(DEVICE, {})
    assert (meta.capacity, meta.limit, meta.capacity_without_limit) == (QUARTER, QUARTER, T4.capacity)


def test_a_limit_above_what_is_free_lowers_no_capacity(t4):
    torch.cuda.set_per_process_memory_fraction(0.999)
    meta = cuda.meta(DEVICE, {})
    assert (meta.capacity, meta.limit, meta.capacity_without_limit) == (T4.capacity, int(0.999 * T4.total), None)


def test_the_gpu_of_this_machine_has_the_limit_of_the_process(t4):
    assert cuda.catalogue_gpu(DEVICE).limit is None
    torch.cuda.set_per_process_memory_fraction(0.25)
    assert cuda.catalogue_gpu(DEVICE).capacity == QUARTER


@pytest.mark.parametrize("counters", [lambda: VirtualCounters(active()), lambda: CudaCounters(DEVICE)])
def test_a_watched_run_has_a_limit_that_is_set_later(t4, counters):
    counted = counters()
    before = counted.capacity, counted.limit
    torch.cuda.set_per_process_memory_fraction(0.25)
    assert (before, counted.capacity, counted.limit) == ((T4.capacity, None), QUARTER, QUARTER)


def test_a_watched_run_says_what_limits_it(t4):
    torch.cuda.set_per_process_memory_fraction(0.25)
    model = torch.nn.Linear(8, 8).cuda()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with mx.watch(model, optimizer) as live:
        model(torch.ones(1, 8, device="cuda")).sum().backward()
        optimizer.step()
        notes = live.notes
    assert any("may use 3.64 GiB" in note and "set_per_process_memory_fraction" in note for note in notes)


def test_the_line_in_the_timeline_is_the_limit(t4):
    torch.cuda.set_per_process_memory_fraction(0.25)
    with mx.record() as recording:
        torch.zeros(1 << 20, device="cuda")
    assert scale(recording.tape).capacity_text.startswith("limit 3.64 GiB")


@pytest.mark.parametrize("settings", ["", "expandable_segments:True"])
def test_a_replay_fails_where_the_limit_made_the_request_fail(settings):
    # 20 blocks of 7 MiB: expandable segments map pages of 20 MiB, also beyond the limit that a request has kept.
    def run() -> None:
        torch.cuda.set_per_process_memory_fraction(50 / 1000)
        for _ in range(20):
            kept.append(torch.empty(7 << 20, dtype=torch.uint8, device="cuda"))

    kept: list[torch.Tensor] = []
    tape = mx.simulate(run, gpu="1000MiB", settings=settings)
    again = replay(tape)
    assert (again.action == tape.action).all()
    assert again.peak("reserved")[0] == tape.peak("reserved")[0]
