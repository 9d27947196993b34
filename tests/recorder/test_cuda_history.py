"""A real GPU's history annotated by notes: both halves are cut from one virtual tape, so the whole is known."""

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
    """The allocator's history of a run, and what was noted of it."""
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
    names = ("time", "action", "address", "size", "category", "phase", "step", "op", "module", "stack")
    noted = Tape.from_columns(
        {name: getattr(whole, name)[kept] for name in names},
        meta=whole.meta,
        ops=whole.ops,
        modules=whole.modules,
        stacks=whole.stacks,
    )
    assert len(noted) < count
    return history, noted


@pytest.mark.parametrize("name", ["action", "address", "size"])
def test_the_allocators_rows_stay_as_they_were(whole, annotated, name):
    assert np.array_equal(getattr(annotated, name), getattr(whole, name))


@pytest.mark.parametrize("name", ["op", "module", "phase", "step", "category"])
def test_noted_blocks_keep_their_meaning(whole, annotated, name):
    noted = (whole.action == Action.ALLOC) & (whole.category != Category.WORKSPACE)
    assert np.array_equal(getattr(annotated, name)[noted], getattr(whole, name)[noted])


def test_what_stays_beside_the_outputs_is_a_workspace(whole, annotated):
    workspace = (whole.action == Action.ALLOC) & (whole.category == Category.WORKSPACE)
    assert workspace.sum() == 2  # cuBLAS: one for the forward pass, one for backward
    assert (annotated.category[workspace] == Category.WORKSPACE).all()
    assert (annotated.op[workspace] == whole.op[workspace]).all()


def test_phases_begin_where_they_began(whole, annotated):
    marks = annotated.phase[annotated.action == Action.MARK].tolist()
    assert marks[:4] == [Phase.FORWARD, Phase.BACKWARD, Phase.OPTIMIZER, Phase.OTHER]


def test_out_of_memory_has_the_op_and_the_layer_that_were_noted():
    tape = mx.simulate(_run, gpu="12MiB", release="2.13")
    history, noted = _cut(tape)
    found = annotate(history, noted.replace(size=np.where(noted.action == Action.OOM, 0, noted.size)))
    [row], [there] = np.flatnonzero(found.action == Action.OOM), np.flatnonzero(tape.action == Action.OOM)
    assert found.size[row] == tape.size[there]
    assert found.ops[found.op[row]] == tape.ops[tape.op[there]]
    assert found.modules[found.module[row]] == tape.modules[tape.module[there]]
