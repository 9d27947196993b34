"""Shape and dtype of the tensors that blocks are allocated for, on the CPU and on the virtual GPU, and the workspaces
that may follow them."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

import memexplore as mx
from memexplore.recorder import tape_builder
from memexplore.recorder.recorder import Recorder
from memexplore.tape import Action, Category, Meta, Source, Tape
from memexplore.text.tensor_text import dtype_of, shape_of
from tests.workspaces import estimate_workspaces_of_relu, possible_workspaces


def texts(tape: Tape, *categories: Category) -> list[str]:
    """Shape and dtype of the allocated and preexisting blocks, of some categories or all, "" where unknown."""
    return [
        tape.tensor_texts[number] if number >= 0 else ""
        for action, category, number in zip(tape.action, tape.category, tape.tensor, strict=True)
        if action in (Action.ALLOC, Action.PREEXISTING) and (not categories or category in categories)
    ]


def recorded(device: str, run: Callable[[str], object]) -> Tape:
    """Return the tape of a function that is called with the device: the CPU, or the virtual GPU as "cuda"."""
    with mx.virtual("T4") if device == "cuda" else contextlib.nullcontext(), mx.record() as recording:
        run(device)
    return recording.tape


def train(device: str) -> None:
    model = nn.Linear(3, 5).to(device)
    optimizer = torch.optim.AdamW(model.parameters())
    output = model(torch.ones(4, 3, device=device))
    output.view(2, 10).sum().backward()
    optimizer.step()


DEVICES = pytest.mark.parametrize("device", ["cpu", "cuda"])


@DEVICES
def test_parameters_have_their_shapes(device: str) -> None:
    assert texts(recorded(device, train), Category.PARAMETER) == ["float32[5, 3]", "float32[5]"]


@DEVICES
def test_output_has_the_batch_first_and_a_view_changes_nothing(device: str) -> None:
    # batch 4, 5 features, also after view(2, 10); then the scalar loss and its gradient
    assert texts(recorded(device, train), Category.ACTIVATION) == ["float32[4, 5]", "float32[]", "float32[]"]


@DEVICES
def test_gradients_and_optimizer_state_have_the_shapes_of_their_parameters(device: str) -> None:
    tape = recorded(device, train)
    # the bias's gradient is a sum over the batch, which keeps the dimension: its block is made for a tensor [1, 5]
    assert sorted(texts(tape, Category.GRADIENT)) == ["float32[1, 5]", "float32[5, 3]"]
    state = [text for text in texts(tape, Category.OPTIMIZER_STATE) if text != "float32[]"]  # step counters on the CPU
    assert sorted(state) == ["float32[5, 3]"] * 2 + ["float32[5]"] * 2


@DEVICES
def test_autocast_makes_bfloat16(device: str) -> None:
    def run(device: str) -> None:
        model = nn.Linear(3, 5).to(device)
        given = torch.ones(4, 3, device=device)
        with torch.autocast(device, torch.bfloat16):
            model(given)

    found = texts(recorded(device, run))
    # input, weight and bias are cast
    assert {"bfloat16[4, 3]", "bfloat16[5, 3]", "bfloat16[5]", "bfloat16[4, 5]"} <= set(found)
    assert "float32[4, 5]" not in found


@DEVICES
def test_numbers_and_empty_shapes(device: str) -> None:
    tape = recorded(device, lambda device: [torch.tensor([1, 2, 3], device=device), torch.tensor(1.5, device=device)])
    assert texts(tape) == ["int64[3]", "float32[]"]


@DEVICES
def test_resized_tensor_gets_a_block_of_its_new_shape(device: str) -> None:
    tape = recorded(device, lambda device: torch.zeros(3, device=device).resize_(7, 2))
    assert texts(tape) == ["float32[3]", "float32[7, 2]"]


@DEVICES
def test_every_text_has_the_size_of_its_block(device: str) -> None:
    def run(device: str) -> None:
        model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten(), nn.Linear(288, 10))
        model.to(device)(torch.ones(2, 3, 8, 8, device=device)).logsumexp(1).sum().backward()

    tape = recorded(device, run)
    known = [row for row in range(len(tape)) if tape.tensor[row] >= 0]
    assert len(known) > 20
    for row in known:
        text = tape.tensor_texts[tape.tensor[row]]
        assert math.prod(shape_of(text) or ()) * getattr(torch, dtype_of(text)).itemsize == tape.size[row]


@DEVICES
def test_tensors_older_than_the_recording_keep_their_shapes(device: str) -> None:
    with mx.virtual("T4") if device == "cuda" else contextlib.nullcontext():
        weight, given = torch.ones(5, 3, device=device), torch.ones(4, 3, device=device)
        with mx.record() as recording:
            # the op's argument is weight.t(), of shape [3, 5]
            output = F.linear(given, weight)
    assert output.shape == (4, 5)
    found = texts(recording.tape)
    assert found[0] == "float32[5, 3]"
    assert "float32[4, 5]" in found
    assert "float32[3, 5]" not in found


@pytest.mark.parametrize("part", [lambda x: x[2:5], torch.t, lambda x: x.permute(1, 0)], ids=["slice", "t", "permute"])
def test_part_of_an_older_storage_is_unknown(part: Callable[[torch.Tensor], torch.Tensor]) -> None:
    older = part(torch.ones(6, 4)).detach()
    with mx.record() as recording:
        older.view_as(older)
    assert texts(recording.tape) == [""]


def test_workspaces_are_no_tensors() -> None:
    tape = recorded("cuda", train)
    assert set(texts(tape, Category.WORKSPACE)) == {""}


def test_only_requests_have_a_tensor() -> None:
    tape = recorded("cuda", train)
    assert set(tape.action[tape.tensor >= 0].tolist()) == {Action.ALLOC}


def test_refused_request_has_its_tensor() -> None:
    # 1024 * 1024 numbers of 4 bytes are 4 MiB
    tape = mx.simulate(lambda: torch.empty(1024, 1024, device="cuda"), gpu="2MiB")
    row = int((tape.action == Action.OOM).nonzero()[0][0])
    assert tape.tensor_texts[tape.tensor[row]] == "float32[1024, 1024]"


def test_model_of_an_earlier_virtual_gpu_keeps_its_shapes() -> None:
    with mx.virtual("T4"):
        weight = torch.ones(5, 3, device="cuda").t()
    with mx.virtual("T4"), mx.record() as recording:
        weight.relu_()
    assert texts(recording.tape) == ["float32[5, 3]"]


def test_emptied_storage_keeps_the_shape_of_its_tensor() -> None:
    def run(device: str) -> None:
        given = torch.ones(5, 3, device=device)
        storage = given.untyped_storage()
        storage.resize_(0)
        storage.resize_(60)  # 5 * 3 * 4
        storage.resize_(128)

    assert texts(recorded("cuda", run)) == ["float32[5, 3]", "float32[5, 3]", ""]


# -- workspaces whose sizes are estimates


def test_a_request_says_what_its_workspace_may_be(monkeypatch: pytest.MonkeyPatch) -> None:
    estimate_workspaces_of_relu(monkeypatch)
    tape = recorded("cuda", lambda device: [torch.ones(size, device=device).relu() for size in (256, 512, 256)])
    small, large = (1024, (1024, 0, 2048)), (2048, (2048, 0, 4096))
    assert possible_workspaces(tape) == [small, large, small]
    assert tape.workspaces == (small[1], large[1])
    # The workspace itself is the next request.
    behind = np.flatnonzero(tape.workspace >= 0) + 1
    assert tape.category[behind].tolist() == [Category.WORKSPACE] * 3
    assert tape.size[behind].tolist() == [1024, 2048, 1024]


def test_a_request_without_a_block_has_no_workspace(monkeypatch: pytest.MonkeyPatch) -> None:
    estimate_workspaces_of_relu(monkeypatch)

    def run(device: str) -> None:
        torch.ones(0, device=device).relu()  # nothing is allocated
        large = torch.ones(5 << 29, device=device)  # 10 of 14.6 GiB
        with contextlib.suppress(torch.OutOfMemoryError):
            large.relu()

    tape = recorded("cuda", run)
    assert Action.OOM in tape.action
    assert (tape.workspaces, set(tape.workspace.tolist())) == ((), {-1})


def test_older_blocks_that_are_recorded_later_leave_workspaces_where_they_are() -> None:
    recorder = Recorder({})
    recorder.alloc(512, 100, torch.ops.aten.relu.default, (), 0, Category.UNKNOWN, "float32[25]")
    recorder.possible_workspace(512, (0, 64))
    recorder.preexisting(1024, 8, None)
    tape = tape_builder.build(recorder, Meta(Source.PREDICTED, "T4"))
    assert tape.action.tolist() == [Action.PREEXISTING, Action.ALLOC]
    assert possible_workspaces(tape) == [(100, (0, 64))]


def test_the_workspace_belongs_to_its_request_although_another_block_is_freed_meanwhile() -> None:
    recorder = Recorder({})
    for address in (512, 1024):
        recorder.alloc(address, address, torch.ops.aten.relu.default, (), 0, Category.UNKNOWN)
    recorder.free(512, 512)
    recorder.possible_workspace(1024, (0, 64))
    assert possible_workspaces(tape_builder.build(recorder, Meta(Source.PREDICTED, "T4"))) == [(1024, (0, 64))]
