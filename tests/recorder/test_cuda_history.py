"""Annotated histories of a GPU: history and recorder's tape are both cut from one virtual tape, the expected result."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn

import memexplore as mx
from memexplore.recorder.cuda import annotate
from memexplore.tape import Action, Category, Frame, Phase, Tape


def _run() -> None:
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 8)).cuda()
    optimizer = torch.optim.AdamW(model.parameters())
    for _ in range(2):
        model(torch.ones(16, 64, device="cuda")).sum().backward()
        optimizer.step()
        optimizer.zero_grad()


@pytest.fixture(scope="module")
def whole() -> Tape:
    return mx.simulate(_run, gpu="T4", release="2.13")


@pytest.fixture(scope="module")
def annotated(whole: Tape) -> Tape:
    return annotate(*_cut(whole))


def _cut(whole: Tape) -> tuple[Tape, Tape]:
    """Return the allocator's history of a run and the recorder's tape of it."""
    count = len(whole)
    is_mark = whole.action == Action.MARK
    history = Tape.from_columns(
        {
            name: getattr(whole, name)[~is_mark]
            for name in ("time", "action", "address", "size", "stream")
        }
        | {"stack": np.zeros(int((~is_mark).sum()), dtype=np.int32)},
        meta=whole.meta,
        stacks=[(Frame("train.py", 1, "<module>"),)],
    )  # fmt: skip
    segments = np.isin(whole.action, (Action.SEGMENT_ALLOC, Action.SEGMENT_FREE))
    kept = ~segments & (whole.category != Category.WORKSPACE)
    names = ("time", "action", "address", "size", "category", "phase", "step", "op", "module", "stack", "tensor")
    noted = Tape.from_columns(
        {name: getattr(whole, name)[kept] for name in names},
        meta=whole.meta,
        ops=whole.ops,
        modules=whole.modules,
        stacks=whole.stacks,
        tensor_texts=whole.tensor_texts,
    )
    assert len(noted) < count
    return history, noted


@pytest.mark.parametrize("name", ["action", "address", "size"])
def test_rows_of_the_allocator_are_unchanged(whole, annotated, name):
    assert np.array_equal(getattr(annotated, name), getattr(whole, name))


@pytest.mark.parametrize("name", ["op", "module", "phase", "step", "category", "tensor"])
def test_noted_blocks_keep_their_annotation(whole, annotated, name):
    noted = (whole.action == Action.ALLOC) & (whole.category != Category.WORKSPACE)
    assert np.array_equal(getattr(annotated, name)[noted], getattr(whole, name)[noted])


def test_a_block_kept_beside_the_outputs_is_a_workspace(whole, annotated):
    workspace = (whole.action == Action.ALLOC) & (whole.category == Category.WORKSPACE)
    assert workspace.sum() == 2  # cuBLAS: one for the forward pass, one for backward
    assert (annotated.category[workspace] == Category.WORKSPACE).all()
    assert (annotated.op[workspace] == whole.op[workspace]).all()


def test_phases_begin_at_the_noted_marks(whole, annotated):
    marks = annotated.phase[annotated.action == Action.MARK].tolist()
    assert marks[:4] == [Phase.FORWARD, Phase.BACKWARD, Phase.OPTIMIZER, Phase.OTHER]


def test_out_of_memory_has_the_noted_op_and_layer():
    tape = mx.simulate(_run, gpu="12MiB", release="2.13")
    history, noted = _cut(tape)
    result = annotate(history, noted.replace(size=np.where(noted.action == Action.OOM, 0, noted.size)))
    [row], [expected] = np.flatnonzero(result.action == Action.OOM), np.flatnonzero(tape.action == Action.OOM)
    assert result.size[row] == tape.size[expected]
    assert result.ops[result.op[row]] == tape.ops[tape.op[expected]]
    assert result.modules[result.module[row]] == tape.modules[tape.module[expected]]
