"""Interrupts of a program that runs under knobs: a KeyboardInterrupt at any line of ours leaves nothing changed."""

from __future__ import annotations

import argparse
import contextlib
from collections.abc import Callable
from types import FrameType
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import BatchSampler, DataLoader, TensorDataset

from memexplore.run import programs
from memexplore.run.knobs.applying import undo
from memexplore.run.knobs.knobs import Knobs
from memexplore.run.programs.acting import Plan, acting
from memexplore.run.programs.seen import Batch, BatchPlace, watching
from memexplore.torch_internals.state import OPTIMIZER_POST_HOOKS, OPTIMIZER_PRE_HOOKS
from tests.interrupts import traced

OURS = (str(next(iter(programs.__path__))), undo.__file__)
KNOBS = Knobs(batch=4, accumulation=2, optimizer="AdamW", zero_grad="set to zero", precision="bf16")


class Lines:
    """A trace function that notes the lines that run in our files, and interrupts one of them."""

    def __init__(self, interrupted: int | None = None) -> None:
        self.lines: list[tuple[str, int]] = []
        self.interrupted = interrupted

    def __call__(self, frame: FrameType, event: str, _: Any) -> Any:
        if not frame.f_code.co_filename.startswith(OURS):
            return None
        if event == "line":
            self.lines.append((frame.f_code.co_filename, frame.f_lineno))
            if len(self.lines) - 1 == self.interrupted:
                raise KeyboardInterrupt
        return self


def train(loader: DataLoader[Any]) -> nn.Module:
    model = nn.Sequential(nn.Linear(2, 3), nn.ReLU(), nn.Linear(3, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    for _ in range(2):
        for (x,) in loader:
            model(x).sum().backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
    return model


def under_knobs(loader: DataLoader[Any]) -> None:
    with (
        acting(Plan(KNOBS, batch=Batch(BatchPlace.LOADER, 8)), {"loader": loader}) as knobs,
        knobs.running(torch.device("cpu")),
    ):
        train(loader)


def watched(loader: DataLoader[Any]) -> None:
    with watching():
        train(loader)


def state(loader: DataLoader[Any]) -> list[Any]:
    """Return everything that is changed for a run."""
    kinds: list[type] = [nn.Module, DataLoader, BatchSampler, torch.amp.GradScaler, argparse.ArgumentParser]
    for base in (torch.optim.Optimizer, LRScheduler):
        kinds += [base, *base.__subclasses__()]
    modules = [torch.autograd, nn.utils, nn.utils.clip_grad]
    # The first optimizer of a class adds the hooks to its step.
    torch.optim.AdamW([torch.zeros(1)]), torch.optim.SGD([torch.zeros(1)])
    return [
        *(dict(vars(owner)) for owner in (*kinds, *modules)),
        (loader.batch_size, loader.batch_sampler.batch_size, dict(OPTIMIZER_PRE_HOOKS), dict(OPTIMIZER_POST_HOOKS)),
        torch.is_autocast_enabled("cpu"),
    ]


def run(program: Callable[[DataLoader[Any]], object], loader: DataLoader[Any], at: int | None = None) -> Lines:
    lines = Lines(at)

    def interrupted() -> None:
        program(loader)

    with contextlib.suppress(KeyboardInterrupt):
        traced(interrupted, lines)
    return lines


@pytest.mark.parametrize("program", [under_knobs, watched])
def test_an_interrupt_at_any_line_leaves_nothing_changed(program: Callable[[DataLoader[Any]], object]) -> None:
    loader = DataLoader(TensorDataset(torch.zeros(16, 2)), batch_size=8)
    before = state(loader)
    lines = run(program, loader).lines
    assert state(loader) == before
    # Where a line runs many times, such as once for each class of optimizers, its first and its last time.
    first = {line: number for number, line in reversed(list(enumerate(lines)))}
    last = {line: number for number, line in enumerate(lines)}
    numbers = sorted({*first.values(), *last.values()})
    assert len(numbers) > 100
    for number in numbers:
        run(program, loader, number)
        assert state(loader) == before, lines[number]
