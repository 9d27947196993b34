"""The history that the allocator of a real GPU records for `%memoom on`; a virtual GPU stands for the real one."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch

import memexplore as mx
from memexplore.out_of_memory import layout
from memexplore.out_of_memory.value import PostMortem
from memexplore.recorder import allocator_history, earlier_blocks
from memexplore.recorder.allocator_history import LastingHistory
from memexplore.tape import Action
from memexplore.torch_internals.cuda import history_is_on
from memexplore.virtual_gpu import device
from tests.jupyter.magics_shell import Shell
from tests.real_gpu import take_for_real

MIB = 1 << 20
TRAINING = """
import torch
model = torch.nn.Sequential(*(torch.nn.Linear(1024, 1024) for _ in range(4))).cuda()
optimizer = torch.optim.AdamW(model.parameters())
kept = []
for _ in range(1000):
    loss = model(torch.ones(1024, 1024, device="cuda")).sum()
    loss.backward(); optimizer.step(); optimizer.zero_grad()
    kept.append(torch.ones(1024, 1024, device="cuda"))
"""


@pytest.fixture
def on_gpu(shell: Shell, monkeypatch: pytest.MonkeyPatch) -> Iterator[Shell]:
    """A shell with a GPU of 256 MiB."""
    monkeypatch.setattr(earlier_blocks, "_workspaces", {})
    monkeypatch.setattr(allocator_history, "lasting", LastingHistory())
    monkeypatch.setattr(layout, "lasting", allocator_history.lasting)
    with mx.virtual("256MiB"):
        take_for_real(monkeypatch, "256MiB")
        for module in (device, layout, allocator_history):
            monkeypatch.setattr(module, "active", lambda: None)
        yield shell
        # Before the virtual GPU is switched off, which restores what a test has replaced of torch.
        monkeypatch.undo()


def test_a_post_mortem_has_the_timeline_and_who_had_the_memory(on_gpu: Shell, found: list[PostMortem]) -> None:
    on_gpu.run("%memoom on")
    on_gpu.run(TRAINING)
    [post_mortem] = found
    tape = post_mortem.tape
    assert np.count_nonzero(tape.action == Action.ALLOC) > 100
    assert post_mortem.request is not None
    kinds = dict(post_mortem.by_category)
    weights = 4 * (1024 * 1024 + 1024) * 4
    assert (kinds["parameter"], kinds["optimizer state"]) == (weights, 2 * weights)
    assert kinds["workspace"] > 0
    assert tape.action[-1] == Action.OOM
    assert post_mortem.request.size == tape.size[-1]
    assert post_mortem.request.line.rpartition(":")[2] in {"7", "8", "9"}
    # The list that grows, from line 9 of the cell.
    largest = max(post_mortem.holders, key=lambda holder: holder.size)
    assert "kept" in largest.name


def test_the_history_ends_with_the_post_mortems(on_gpu: Shell) -> None:
    on_gpu.run("%memoom on")
    on_gpu.run("import torch; x = torch.ones(10, device='cuda')")
    assert history_is_on()
    on_gpu.run("%memoom off")
    assert not history_is_on()


def test_a_history_of_the_user_goes_on(on_gpu: Shell, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.cuda.memory._record_memory_history(max_entries=10)
    calls: list[Any] = []
    record = torch.cuda.memory._record_memory_history
    monkeypatch.setattr(torch.cuda.memory, "_record_memory_history", lambda *args, **options: calls.append(options))
    on_gpu.run("%memoom on")
    on_gpu.run("x = torch.ones(10, device='cuda')")
    on_gpu.run("%memoom off")
    assert calls == []
    assert history_is_on()
    record(None)


def test_a_recording_has_a_history_of_its_own_and_the_lasting_one_goes_on(on_gpu: Shell) -> None:
    on_gpu.run("%memoom on")
    on_gpu.run("import torch; x = torch.ones(10, device='cuda')")
    with mx.record() as recording:
        torch.ones(1000, device="cuda")
    sizes = recording.tape.size[recording.tape.action == Action.ALLOC]
    assert sizes.tolist() == [4000]
    assert history_is_on()
    assert torch.cuda.memory._snapshot()["device_traces"] == [[]]


def test_a_history_begins_when_the_gpu_is_first_used(on_gpu: Shell, monkeypatch: pytest.MonkeyPatch) -> None:
    later: list[Callable[[], None]] = []
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: False)
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "_lazy_call", later.append)
    on_gpu.run("%memoom on")
    on_gpu.run("x = 1")
    assert not history_is_on()
    [begin] = later
    begin()
    assert history_is_on()
    on_gpu.run("%memoom off")
    assert not history_is_on()
