"""A script that profiles itself leaves the file it would leave on a real GPU."""

from __future__ import annotations

import pickle
import time

import pytest
import torch
from torch import nn

import memexplore as mx
from memexplore.snapshot import verify
from memexplore.tape import Action


def _script(path: str) -> None:
    torch.cuda.memory._record_memory_history(max_entries=100_000)
    model = nn.Linear(1000, 1000).cuda()
    for _ in range(2):
        model(torch.ones(64, 1000, device="cuda")).sum().backward()
        model.zero_grad()
    torch.cuda.memory._dump_snapshot(path)
    torch.cuda.memory._record_memory_history(enabled=None)


@pytest.fixture(scope="module")
def dumped(tmp_path_factory):
    path = tmp_path_factory.mktemp("history") / "snapshot.pickle"
    tape = mx.simulate(lambda: _script(str(path)), gpu="T4")
    return path, tape


def test_the_history_holds_the_requests_of_the_tape(dumped):
    path, tape = dumped
    recorded = mx.load(path)[0]
    sizes = recorded.size[recorded.action == Action.ALLOC].tolist()
    assert sizes == tape.size[tape.action == Action.ALLOC].tolist()


def test_the_replayed_history_agrees_in_every_address(dumped):
    path, _ = dumped
    (device,) = verify(path)["devices"]
    same, every = device["alloc_addresses"]
    assert same == every > 0
    assert device["history"] == "complete"


def test_pytorchs_own_viewer_reads_it(dumped):
    path, _ = dumped
    from torch.cuda import _memory_viz

    with open(path, "rb") as file:
        snapshot = pickle.load(file)
    assert "<html" in _memory_viz.trace_plot(snapshot).lower()
    assert len(_memory_viz.segsum(snapshot)) > 0


def test_stacks_name_the_line_of_the_script(dumped):
    path, _ = dumped
    tape = mx.load(path)[0]
    row = int((tape.size == 64 * 1000 * 4).argmax())
    assert any(frame.filename == __file__ and frame.function == "_script" for frame in tape.stacks[tape.stack[row]])


def test_history_keeps_at_most_max_entries_events():
    with mx.virtual("T4"):
        torch.cuda.memory._record_memory_history(max_entries=3)
        blocks = [torch.ones(100, device="cuda") for _ in range(10)]
        assert len(torch.cuda.memory._snapshot()["device_traces"][0]) == 3
        assert len(blocks) == 10


def test_events_have_the_time_since_1970():
    with mx.virtual("T4"):
        before = time.time_ns() // 1000
        torch.cuda.memory._record_memory_history()
        torch.ones(100, device="cuda")
        events = torch.cuda.memory._snapshot()["device_traces"][0]
        after = time.time_ns() // 1000
    # Two clocks, each read at another time.
    assert all(before - 1000 <= event["time_us"] <= after + 1000 for event in events)


def test_without_history_there_are_segments_and_no_events():
    with mx.virtual("T4"):
        block = torch.ones(100, device="cuda")
        snapshot = torch.cuda.memory._snapshot()
        assert [segment["total_size"] for segment in snapshot["segments"]] == [2 * 1024**2]
        assert snapshot["device_traces"] == [[]]
        assert block.numel() == 100


def test_the_functions_of_torch_are_restored():
    before = torch.cuda.memory._snapshot
    with mx.virtual("T4"):
        assert torch.cuda.memory._snapshot is not before
    assert torch.cuda.memory._snapshot is before


def test_a_history_that_ended_is_empty_as_on_a_real_gpu():
    with mx.virtual("T4"):
        torch.cuda.memory._record_memory_history()
        assert torch._C._cuda_isHistoryEnabled()
        older = torch.empty(1000, device="cuda")
        assert len(torch.cuda.memory._snapshot()["device_traces"][0]) == 2  # a segment and its block
        torch.cuda.memory._record_memory_history(enabled=None)
        assert not torch._C._cuda_isHistoryEnabled()
        assert torch.cuda.memory._snapshot()["device_traces"] == [[]]
        torch.cuda.memory._record_memory_history()
        newer = torch.empty(1000, device="cuda")
        actions = [event["action"] for event in torch.cuda.memory._snapshot()["device_traces"][0]]
        assert actions == ["alloc"]
        assert older.shape == newer.shape
