"""Categories of blocks older than a recording of a real GPU are those that a virtual GPU gives them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn

import memexplore as mx
from memexplore.recorder import earlier_blocks
from memexplore.recorder.earlier_blocks import Earlier, Untouched, classified
from memexplore.recorder.events import Origin
from memexplore.tape import Action, Category, Frame, Meta, Phase, Source, Tape
from tests.real_gpu import take_for_real
from tests.workspaces import CUBLAS, CUBLASLT

MIB = 1024**2
THERE, ALLOC, FREE, DONE, MARK = (
    Action.PREEXISTING,
    Action.ALLOC,
    Action.FREE_REQUESTED,
    Action.FREE_COMPLETED,
    Action.MARK,
)


@pytest.fixture(params=[True, False], ids=["real", "virtual"])
def gpu(request: Any, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A virtual GPU, taken for a real one or not."""
    monkeypatch.setattr(earlier_blocks, "_workspaces", {})
    with mx.virtual("T4"):
        if request.param:
            take_for_real(monkeypatch)
        yield


def recorded(function: Callable[[], Any]) -> Tape:
    with mx.record() as recording:
        function()
    return recording.tape


def at_peak(tape: Tape) -> dict[str, int]:
    """Bytes at the peak by category, without those that are 0."""
    at = tape.by_category().iloc[tape.peak()[1]]
    return {kind: int(size) for kind, size in at.items() if size}


class Training:
    def __init__(self) -> None:
        self.model = nn.Linear(256, 256).cuda()
        self.optimizer = torch.optim.SGD(self.model.parameters(), 0.1, momentum=0.9)

    def step(self) -> None:
        self.model(torch.randn(8, 256, device="cuda")).sum().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()


def test_a_tensor_that_nothing_uses_is_no_parameter(gpu: None) -> None:
    training = Training()
    other = torch.ones(MIB, device="cuda")
    kinds = at_peak(recorded(training.step))
    assert kinds["parameter"] == 4 * (256 * 256 + 256)
    assert kinds["input"] == other.nbytes


def test_workspaces_of_an_earlier_step_are_workspaces(gpu: None) -> None:
    training = Training()
    training.step()
    kinds = at_peak(recorded(training.step))
    # One of cuBLAS for each of two threads, and that of cuBLASLt for the layer's bias.
    assert kinds["workspace"] == 2 * CUBLAS + CUBLASLT
    assert kinds["parameter"] == kinds["optimizer state"] == 4 * (256 * 256 + 256)


def test_a_block_keeps_the_category_and_line_that_an_earlier_recording_gave_it(gpu: None) -> None:
    kept: list[torch.Tensor] = []

    def keep() -> None:
        with torch.no_grad():
            kept.append(nn.Linear(64, 64).cuda()(torch.ones(64, 64, device="cuda")))

    earlier = recorded(keep)
    tape = recorded(lambda: torch.ones(10, device="cuda"))
    row, before = ((each.size == kept[0].nbytes) & (each.address == kept[0].data_ptr()) for each in (tape, earlier))
    [kind], [line] = tape.category[row], tape.stack[row]
    assert tape.action[row].tolist() == [THERE]
    assert kind == earlier.category[before][0] == Category.TEMPORARY
    assert tape.stacks[line][0] == earlier.stacks[earlier.stack[before][0]][0]


def test_what_a_recording_left_is_forgotten_with_its_storage() -> None:
    before = len(earlier_blocks._storages)
    with mx.record("cpu") as recording:
        tensor = torch.ones(1000)
    assert len(recording.tape)
    assert len(earlier_blocks._storages) == before + 1
    del tensor
    assert len(earlier_blocks._storages) == before


def older(*sizes: int, freed: tuple[int, ...] = ()) -> Tape:
    """A tape of older blocks at 0, MiB, 2 MiB, …, of which some are freed before the forward pass begins."""
    rows = [(THERE, at * MIB, size) for at, size in enumerate(sizes)]
    rows += [(action, at * MIB, sizes[at]) for at in freed for action in (FREE, DONE)]
    action, address, size = zip(*rows, (MARK, -1, 0), (ALLOC, 900 * MIB, 512), strict=True)
    count = len(rows)
    phase = [Phase.OTHER] * count + [Phase.FORWARD] * 2
    return Tape.from_columns(
        {"action": action, "address": address, "size": size, "phase": phase}, meta=Meta(Source.MEASURED, "cuda:0")
    )


def categories(tape: Tape, known: Earlier) -> list[Category]:
    rows = (tape.action == THERE).nonzero()[0]
    return [Category(kind) for kind in classified(tape, rows, known).category[rows].tolist()]


def test_blocks_of_the_size_of_a_workspace_are_two_on_a_stream() -> None:
    known = Earlier({}, frozenset(), frozenset([4096]))
    kinds = categories(older(4096, 512, 4096, 4096), known)
    assert kinds == [Category.WORKSPACE, Category.INPUT, Category.WORKSPACE, Category.INPUT]


def test_blocks_that_a_watched_step_does_not_use_have_no_category() -> None:
    known = Earlier({}, frozenset(), frozenset([4096]), Untouched.KEPT)
    assert categories(older(512, 4096, 512, freed=(2,)), known) == [
        Category.UNKNOWN,
        Category.WORKSPACE,
        Category.UNKNOWN,
    ]


def test_a_block_freed_before_the_forward_pass_is_a_temporary() -> None:
    assert categories(older(512, freed=(0,)), Earlier({}, frozenset(), frozenset([4096]))) == [Category.TEMPORARY]


def test_the_workspaces_of_the_recording_before_are_known_by_their_place() -> None:
    known = Earlier({}, frozenset([(MIB, 777)]), frozenset([4096]))
    assert categories(older(777, 777), known) == [Category.INPUT, Category.WORKSPACE]


def test_an_older_block_has_the_layer_of_its_origin() -> None:
    stack = (Frame("cell.py", 3, "<module>"),)
    known = Earlier({(0, 512): Origin("aten::mm", "head", stack, Category.ACTIVATION)}, frozenset(), frozenset([4096]))
    tape = classified(older(512), torch.tensor([0]).numpy(), known)
    assert (tape.ops, tape.modules, tape.stacks) == (("aten::mm",), ("head",), (stack,))
    assert (tape.op[0], tape.module[0], tape.stack[0], tape.category[0]) == (0, 0, 0, Category.ACTIVATION)
