"""What a real GPU holds at a failure that was not recorded; a virtual GPU stands for the real one."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

import memexplore as mx
from memexplore.out_of_memory import layout
from memexplore.out_of_memory.evidence_types import Evidence
from memexplore.out_of_memory.message import parse
from memexplore.recorder import earlier_blocks
from memexplore.tape import Action, Category, Tape
from tests.real_gpu import take_for_real

KIB = 1024
FAILED = Evidence(parse("CUDA out of memory. Tried to allocate 256.00 MiB. GPU 0 has a total capacity of 14.56 GiB"))


@pytest.fixture(autouse=True)
def real_gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(earlier_blocks, "_workspaces", {})
    with mx.virtual("T4"):
        take_for_real(monkeypatch)
        monkeypatch.setattr(layout, "active", lambda: None)
        yield


def at_the_end() -> dict[str, int]:
    """Bytes that are allocated at the failure, by category."""
    tape = layout.present(FAILED)
    assert isinstance(tape, Tape)
    return {kind: int(size) for kind, size in tape.by_category().iloc[-1].items() if size}


def trained() -> tuple[nn.Module, torch.optim.Optimizer]:
    model = nn.Linear(256, 256, bias=False).cuda()
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.ones(8, 256, device="cuda")).sum().backward()
    optimizer.step()
    return model, optimizer


def test_blocks_have_the_category_of_the_live_model_and_optimizer_that_own_them() -> None:
    model, optimizer = trained()
    data = torch.ones(300, 256, device="cuda")
    held = at_the_end()
    weight = 256 * KIB
    assert (held["parameter"], held["gradient"], held["optimizer state"]) == (weight, weight, 2 * weight)
    assert held["workspace"] == 2 * 8_519_680
    # Nobody knows what the tensor is for.
    assert held["unknown"] == data.nbytes
    assert len(optimizer.state) == len(list(model.parameters()))


def test_what_a_live_model_owns_is_known_also_where_a_history_runs() -> None:
    torch.cuda.memory._record_memory_history()
    model, optimizer = trained()
    held = at_the_end()
    weight = 256 * KIB
    assert (held["parameter"], held["gradient"], held["optimizer state"]) == (weight, weight, 2 * weight)
    assert optimizer.param_groups[0]["params"][0] is next(model.parameters())


def test_a_layout_without_events_has_no_parameters(tmp_path: Path) -> None:
    tensors = [torch.ones(size, device="cuda") for size in (1000, 2000)]
    path = tmp_path / "layout.pickle"
    torch.cuda.memory._dump_snapshot(str(path))
    [tape] = mx.load(path).values()
    blocks = tape.action == Action.PREEXISTING
    assert sorted(tape.size[blocks & (tape.category == Category.UNKNOWN)].tolist())[-2:] == [4000, 8000]
    assert not np.any(tape.category[blocks] == Category.PARAMETER)
    assert len(tensors) == 2
