"""Annotated histories of a GPU: history and recorder's tape are both cut from one virtual tape, the expected result."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn

import memexplore as mx
from memexplore.recorder.annotation import annotate
from memexplore.recorder.tape_builder import OWN
from memexplore.tape import Action, Category, Frame, Meta, Phase, Source, Tape


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


# --- rows of a few requests ----------------------------------------------------------------------------------------

META = Meta(Source.MEASURED, "cuda:0")
ALLOC, FREE, DONE, MARK, SEGMENT = (
    Action.ALLOC,
    Action.FREE_REQUESTED,
    Action.FREE_COMPLETED,
    Action.MARK,
    Action.SEGMENT_ALLOC,
)
OPS = ("aten::add", "aten::mul")
USER, OF_MEMEXPLORE = Frame("train.py", 7, "step"), Frame(f"{OWN[0]}recorder/real_device.py", 101, "__torch_dispatch__")


def tape_of(*rows: tuple[Action, int, int], op: tuple[int, ...] = (), **columns: tuple[int, ...]) -> Tape:
    """The tape of rows of action, address and size, with other columns as given; ops are positions in `OPS`."""
    names = dict(zip(("action", "address", "size"), zip(*rows, strict=True), strict=True))
    return Tape.from_columns(
        {**names, "op": op or (-1,) * len(rows), **columns},
        meta=META,
        ops=OPS,
        stacks=[(OF_MEMEXPLORE, USER), (OF_MEMEXPLORE,), (USER,)],
    )


def temporary(address: int, size: int) -> tuple[tuple[Action, int, int], ...]:
    return (ALLOC, address, size), (FREE, address, size), (DONE, address, size)


def op_of(tape: Tape, row: int) -> str:
    return tape.ops[tape.op[row]] if tape.op[row] >= 0 else ""


def test_a_block_that_an_op_freed_is_not_the_output_of_a_later_op_at_the_same_place():
    history = tape_of((ALLOC, 0, 512), *temporary(4096, 1024), (ALLOC, 8192, 512), (ALLOC, 4096, 1024))
    noted = tape_of((ALLOC, 0, 512), (ALLOC, 8192, 512), (ALLOC, 4096, 1024), op=(0, 0, 1))
    tape = annotate(history, noted)
    assert [op_of(tape, row) for row in np.flatnonzero(tape.action == ALLOC)] == ["aten::add"] * 3 + ["aten::mul"]
    # The place of the temporary is that of the output of the first op, too.
    noted = tape_of((ALLOC, 8192, 512), (ALLOC, 4096, 1024), op=(0, 1))
    assert [op_of(annotate(history, noted), row) for row in (4, 5)] == ["aten::add", "aten::mul"]


def test_frames_of_memexplore_are_no_lines():
    history = tape_of((ALLOC, 0, 512), (ALLOC, 512, 512), (SEGMENT, 4096, 4096), (ALLOC, 4096, 512), stack=(0, 1, 1, 1))
    noted = tape_of((ALLOC, 4096, 512), op=(0,), stack=(2,))
    tape = annotate(history, noted)
    stacks = [tape.stacks[number] if number >= 0 else () for number in tape.stack.tolist()]
    assert stacks == [(USER,), (), (), (USER,)]


def test_a_request_has_the_line_of_the_op_that_it_belongs_to():
    history = tape_of((ALLOC, 0, 512), *temporary(512, 512), stack=(1, 1, -1, -1))
    tape = annotate(history, tape_of((ALLOC, 0, 512), op=(0,), stack=(2,)))
    assert [tape.stacks[number] for number in tape.stack[:2].tolist()] == [(USER,), (USER,)]
    assert tape.stack[2:].tolist() == [-1, -1]


def test_a_phase_begins_in_front_of_all_requests_of_its_first_op():
    # The second output was made first, in a segment of its own.
    history = tape_of((ALLOC, 0, 512), (SEGMENT, 4096, 4096), (ALLOC, 4096, 1024), (ALLOC, 512, 512))
    noted = tape_of(
        (ALLOC, 0, 512), (MARK, -1, 0), (ALLOC, 512, 512), (ALLOC, 4096, 1024),
        op=(0, -1, 1, 1), phase=(Phase.FORWARD, *[Phase.BACKWARD] * 3), step=(1, 1, 1, 1),
    )  # fmt: skip
    tape = annotate(history, noted)
    assert tape.action.tolist() == [ALLOC, MARK, SEGMENT, ALLOC, ALLOC]
    assert tape.phase.tolist() == [Phase.FORWARD, *[Phase.BACKWARD] * 4]


def test_a_mark_has_the_time_of_the_row_behind_it():
    history = tape_of((ALLOC, 0, 512), (ALLOC, 512, 512), (ALLOC, 1024, 512), time=(0, 5, 6))
    noted = tape_of((ALLOC, 0, 512), (MARK, -1, 0), (ALLOC, 512, 512), op=(0, -1, 1), time=(7000, 8000, 9000))
    assert annotate(history, noted).time.tolist() == [0, 5, 5, 6]
