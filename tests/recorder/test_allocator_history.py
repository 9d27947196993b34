"""The allocator's history during a recording on a GPU; a virtual GPU, whose history a script records, stands for it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import memexplore as mx
from memexplore.recorder import cuda
from memexplore.recorder.allocator_history import AllocatorHistory
from memexplore.recorder.real_device import RealDevice
from memexplore.recorder.tape_builder import OWN
from memexplore.snapshot import read
from memexplore.tape import Action, Meta, Source

CUDA = torch.device("cuda", 0)


@pytest.fixture(autouse=True)
def real_gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    with mx.virtual("T4"):
        monkeypatch.setattr(cuda, "meta", lambda device, versions: Meta(Source.MEASURED, str(device)))
        yield


@pytest.fixture
def begun(real_gpu: None, monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """The settings of each history that begins."""
    calls: list[dict[str, Any]] = []
    record = torch.cuda.memory._record_memory_history

    def noting(enabled: Any = "all", **settings: Any) -> None:
        if enabled:
            calls.append(settings)
        record(enabled, **settings)

    monkeypatch.setattr(torch.cuda.memory, "_record_memory_history", noting)
    return calls


def test_a_history_has_the_stacks_of_allocations_and_not_those_of_frees(begun: list[dict[str, Any]]) -> None:
    history = AllocatorHistory(CUDA, most_events=100)
    history.begin()
    history.end()
    assert begun == [{"max_entries": 100, "context": "alloc", "stacks": "python", "clear_history": True}]


def test_a_recording_begins_and_ends_a_history(begun: list[dict[str, Any]]) -> None:
    real = RealDevice({}, CUDA)
    with real.watch():
        torch.empty(1000, device="cuda")
    assert [settings["context"] for settings in begun] == ["alloc"]
    assert real.history is not None
    assert real.history.tape.size[real.history.tape.action == Action.ALLOC].tolist() == [4000]
    assert torch.cuda.memory._snapshot()["device_traces"] == [[]]


def test_a_history_of_the_user_goes_on_and_the_recording_has_its_own_part(begun: list[dict[str, Any]]) -> None:
    torch.cuda.memory._record_memory_history(max_entries=77)
    earlier = torch.empty(100, device="cuda")
    real = RealDevice({}, CUDA)
    with real.watch():
        torch.empty(1000, device="cuda")
    assert begun == [{"max_entries": 77}]
    assert real.history is not None
    assert real.history.tape.size[real.history.tape.action == Action.ALLOC].tolist() == [4000]
    sizes = [event["size"] for event in torch.cuda.memory._snapshot()["device_traces"][0] if event["action"] == "alloc"]
    assert sizes == [earlier.nbytes, 4000]
    torch.cuda.memory._record_memory_history(enabled=None)


def test_a_snapshot_of_the_user_has_no_lines_of_a_recording(begun: list[dict[str, Any]], tmp_path: Path) -> None:
    path = tmp_path / "of_the_user.pickle"
    torch.cuda.memory._record_memory_history()
    weight = torch.ones(64, 64, device="cuda", requires_grad=True)
    with RealDevice({}, CUDA).watch():
        (weight @ weight).sum().backward()
    torch.cuda.memory._dump_snapshot(str(path))
    torch.cuda.memory._record_memory_history(enabled=None)
    recorded = read(path)[0]
    tape = mx.load(path)[0]
    frames = {frame["filename"] for stack in recorded.stacks for frame in stack}
    assert any(name.endswith("op_numbers.py") for name in frames)
    assert not any(frame.filename.startswith(OWN) for stack in tape.stacks for frame in stack)
