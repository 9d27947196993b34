"""Settings that fail in a watched run are undone, and after the block nothing of the user's stays changed."""

from __future__ import annotations

import contextlib
import gc
import weakref
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

import memexplore as mx
from memexplore.run.knobs.knobs import Knobs
from tests.live.knob_loops import CHECKPOINT, Trained, states, switched
from tests.live.test_watch_ended import lines_of_package, watch_state
from tests.live.training import on
from tests.small_nets import everything

BOTH = pytest.mark.parametrize("device", ["cpu", "cuda"])


pytestmark = pytest.mark.usefixtures("every_setting_fits")


class Fragile(nn.Module):
    """A block that raises an error in its forward or backward pass while a flag is set."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(8, 8)
        self.fails_in = ""

    def forward(self, value: torch.Tensor) -> torch.Tensor:
        result = self.inner(value)
        if self.fails_in == "forward":
            raise RuntimeError("out of something")
        if self.fails_in == "backward" and result.requires_grad:
            result.register_hook(self._raise)
        return result

    def _raise(self, gradient: torch.Tensor) -> None:
        raise RuntimeError("out of something")


@pytest.mark.parametrize("where", ["forward", "backward"])
def test_a_setting_whose_first_step_fails_is_undone_and_training_goes_on(where):
    model = nn.Sequential(Fragile(), Fragile())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    errors = []
    with mx.watch(model, optimizer) as live:
        for number in range(6):
            if number == 1:
                live.knobs = CHECKPOINT
            model[1].fails_in = where if number == 2 else ""
            try:
                model(torch.ones(2, 8)).square().mean().backward()
                optimizer.step()
            except RuntimeError as error:
                errors.append((number, str(error)))
            optimizer.zero_grad()
            if number > 2:
                assert live.applied == Knobs()
                assert "forward" not in vars(model[0])
    assert errors == [(2, "out of something")]
    assert states(live) == ["undone"]
    assert live.changes()["reason"][0] == "RuntimeError: out of something"


def test_after_a_failed_setting_the_one_before_is_in_effect():
    model = nn.Sequential(Fragile(), Fragile())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with mx.watch(model, optimizer) as live:
        for number in range(6):
            if number in (0, 2):
                live.knobs = CHECKPOINT if number == 0 else Knobs(checkpoint="sqrt")
            model[1].fails_in = "forward" if number == 3 else ""
            with contextlib.suppress(RuntimeError):
                model(torch.ones(2, 8)).square().mean().backward()
                optimizer.step()
            optimizer.zero_grad()
        assert live.applied == CHECKPOINT
    assert states(live) == ["applied", "undone"]


def test_an_error_that_ends_the_block_is_the_reason():
    model = nn.Sequential(Fragile(), Fragile())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    before = everything(model)
    with pytest.raises(RuntimeError, match="out of something"), mx.watch(model, optimizer) as live:
        live.knobs = CHECKPOINT
        model(torch.ones(2, 8)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        model[0].fails_in = "forward"
        model(torch.ones(2, 8))
    model[0].fails_in = ""
    assert states(live) == ["undone"]
    assert live.changes()["reason"][0] == "RuntimeError: out of something"
    assert everything(model).keys() == before.keys()
    assert "forward" not in vars(model[0])


def test_an_error_while_a_setting_is_applied_undoes_it(monkeypatch):
    loop = Trained()

    def broken(*_: Any) -> None:
        raise RuntimeError("no such format")

    with mx.watch(loop.model, loop.optimizer) as live:
        live.knobs = CHECKPOINT
        loop.step()
        monkeypatch.setattr("memexplore.run.knobs.memory_format.change_inputs", broken)
        live.knobs = CHECKPOINT.replace(memory_format="channels last")
        loop.step()
        loop.step()
        assert live.applied == CHECKPOINT
    assert states(live) == ["applied", "undone"]
    assert live.changes()["reason"][1] == "RuntimeError: no such format"


class ReadsValues(nn.Module):
    """A model that needs the values of its input in forward."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, value: torch.Tensor) -> torch.Tensor:
        return torch.relu(self.linear(torch.tensor(value.numpy())))


def test_in_place_on_a_model_that_needs_values_is_undone_without_an_error_in_the_loop():
    model = ReadsValues()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with mx.watch(model, optimizer) as live:
        for number in range(5):
            if number == 1:
                live.knobs = Knobs(inplace="on")
            model(torch.ones(2, 8)).sum().backward()
            optimizer.step()
    assert states(live) == ["undone"]
    assert "the model cannot run on fake tensors" in live.changes()["reason"][0]
    assert len(live.steps()) == 5


def test_out_of_memory_in_the_first_step_goes_back_to_the_setting_that_fits():
    with mx.virtual("120MiB", release="2.13"):
        torch.manual_seed(0)
        model = nn.Sequential(*(nn.Sequential(nn.Linear(256, 256), nn.GELU()) for _ in range(8))).cuda()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        batch = torch.randn(6000, 256, device="cuda")
        failed = 0
        with mx.watch(model, optimizer) as live:
            live.knobs = CHECKPOINT
            model(batch[:10]).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            for number in range(4):
                if number == 1:
                    live.knobs = Knobs()
                try:
                    model(batch).square().mean().backward()
                    optimizer.step()
                except torch.OutOfMemoryError:
                    failed += 1
                optimizer.zero_grad()
            assert live.applied == CHECKPOINT
    assert failed == 1
    assert states(live) == ["applied", "undone"]


# --- nothing stays changed ------------------------------------------------------------------------------------------


@BOTH
def test_no_model_is_kept_alive_after_the_block(device):
    with on(device):
        loop, live = switched(3, {1: CHECKPOINT}, device)
        gone = [weakref.ref(loop.model), weakref.ref(loop.optimizer)]
        del loop
        gc.collect()
    assert [each() for each in gone] == [None, None]
    assert len(live.changes()) == 1


# In-place activations are left out: each of their runs on fake tensors takes a second.
KNOBS = Knobs(checkpoint="every 1", memory_format="channels last")


@pytest.fixture
def no_collection() -> Iterator[None]:
    """Keep finalizers from running between the lines."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()


@pytest.mark.parametrize("part", range(4))
def test_an_interrupt_at_any_line_of_a_run_with_knobs_leaves_nothing_changed(part, no_collection):
    loop = Trained()
    loop.step()

    def block(*settings: Knobs) -> None:
        with mx.watch(loop.model, loop.optimizer, first=0, every=1000) as live:
            for knobs in settings:
                live.knobs = knobs
                loop.step()

    def switching() -> None:
        block(KNOBS, Knobs(checkpoint="sqrt"), Knobs())

    block()
    before = watch_state(loop), torch.autograd._engine_run_backward
    first: dict[tuple[str, int], int] = {}
    # The others are interrupted in `test_watch_ended`.
    others = set(lines_of_package(block))
    for number, line in enumerate(lines_of_package(switching)):
        if line not in others:
            first.setdefault(line, number)
    left = []
    for line, number in list(first.items())[part::4]:
        lines_of_package(switching, number)
        if (watch_state(loop), torch.autograd._engine_run_backward) != before:
            left.append(line)
        loop.optimizer.zero_grad()
    assert left == []
    assert len(first) > 60
