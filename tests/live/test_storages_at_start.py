"""Tensors that a watched run keeps from its earlier steps, in the tape of a later one."""

from __future__ import annotations

import weakref
from collections.abc import Iterator

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import memexplore as mx
from memexplore.live.storages_at_start import StoragesAtStart
from memexplore.tape import Action, Category, Tape
from tests.live.training import Loop, on

KEPT = (4, 333)
"""Shape of a kept tensor that nothing else has: 4 * 333 * 4 = 5 328 bytes."""
NOTE = "1 block (5.20 KiB) was kept from earlier steps: this tape has neither its layer nor its line."


def category(tape: Tape, text: str) -> list[Category]:
    """The categories of the blocks, older than the tape, for tensors with a text."""
    number = tape.tensor_texts.index(text)
    rows = (tape.tensor == number) & (tape.action == Action.PREEXISTING)
    return [Category(int(each)) for each in tape.category[rows]]


@pytest.fixture(params=["cpu", "cuda"])
def device(request: pytest.FixtureRequest) -> Iterator[str]:
    with on(request.param):
        yield request.param


def test_a_tensor_kept_from_a_step_that_was_not_recorded_is_no_input():
    with on("cuda"):
        loop = Loop("cuda")
        with mx.watch(loop.model, loop.optimizer, first=0, every=3) as live:
            loop.step()
            kept = torch.ones(KEPT, device="cuda")
            for _ in range(5):
                loop.step()
    # Also in the tape after the first one that has it.
    for step in (3, 6):
        assert category(live.tape(step), "float32[4, 333]") == [Category.UNKNOWN]
        assert NOTE in live.tape(step).meta.notes
    del kept


def test_a_tensor_older_than_the_run_stays_an_input(device: str) -> None:
    loop = Loop(device)
    older = torch.ones(KEPT, device=device)
    with mx.watch(loop.model, loop.optimizer, first=0, every=2) as live:
        loop.step()
        older += 1
        loop.step()
        older += 1
    loop_ended = live.tape(2)
    assert category(loop_ended, "float32[4, 333]") == [Category.INPUT]
    assert loop_ended.meta.notes == ()


def test_a_batch_that_an_earlier_step_has_loaded_stays_an_input(device: str) -> None:
    """A loader that is a batch ahead: the target is read by a function, with a tensor that requires a gradient."""
    model = nn.Linear(8, 10).to(device)
    optimizer = torch.optim.SGD(model.parameters())

    def batch() -> tuple[torch.Tensor, torch.Tensor]:
        return torch.ones(333, 8, device=device), torch.zeros(333, dtype=torch.int64, device=device)

    with mx.watch(model, optimizer, first=0, every=4) as live:
        following = batch()
        # The first step is recorded because its shapes are new, the next two are not.
        for _ in range(4):
            (x, y), following = following, batch()
            F.cross_entropy(model(x), y.view(-1)).backward()
            optimizer.step()
            optimizer.zero_grad()
    tape = live.tape(4)
    # On the virtual GPU the tape has the batch of the step before as well, which is freed before the forward pass.
    assert category(tape, "int64[333]")[-1] == Category.INPUT
    assert category(tape, "float32[333, 8]")[-1] == Category.INPUT
    assert tape.meta.notes == ()


def test_a_mask_of_a_batch_of_a_new_shape_stays_an_input() -> None:
    """The recording begins with the call of the model, when the batch is there already."""

    class Masked(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(8, 8)

        def forward(self, x: torch.Tensor, options: dict[str, torch.Tensor]) -> torch.Tensor:
            return (self.layer(x) * options["mask"].to(torch.float32)).sum()

    with on("cuda"):
        model = Masked().cuda()
        optimizer = torch.optim.SGD(model.parameters())
        with mx.watch(model, optimizer, first=0, every=10**9) as live:
            for length in (4, 333):
                mask = torch.ones(length, 8, dtype=torch.bool, device="cuda")
                model(torch.ones(length, 8, device="cuda"), options={"mask": mask}).backward()
                optimizer.step()
                optimizer.zero_grad()
        tape = live.tape(2)
    assert category(tape, "bool[333, 8]") == [Category.INPUT]
    assert tape.meta.notes == ()


def test_what_is_older_keeps_no_tensor_alive():
    with mx.virtual("T4"):
        tensor = torch.ones(3, device="cuda")
        at_start = StoragesAtStart()
        storage = tensor.untyped_storage()
        assert not at_start.is_new(storage)
        assert at_start.is_new(torch.ones(3, device="cuda").untyped_storage())
        died: list[str] = []
        weakref.finalize(storage, died.append, "died")
        del tensor, storage
        assert died == ["died"]
