"""Interrupts of `apply`: a KeyboardInterrupt at any line of entering and leaving leaves nothing changed."""

from __future__ import annotations

import contextlib
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch
import torch.utils.checkpoint
from torch import nn

from memexplore.run import knobs as package
from memexplore.run.knobs.applying.apply import apply
from memexplore.run.knobs.applying.scope import scopes
from memexplore.run.knobs.inplace_sites import legal
from memexplore.run.knobs.knobs import Knobs
from tests.interrupts import traced
from tests.small_nets import everything

FOLDER = str(Path(package.__file__).parent)


class Lines:
    """A trace function that records the lines that run in the knobs package, and interrupts one of them."""

    def __init__(self, interrupted: int | None = None) -> None:
        self.lines: list[tuple[str, int]] = []
        self.interrupted = interrupted

    def __call__(self, frame: FrameType, event: str, _: Any) -> Any:
        if not frame.f_code.co_filename.startswith(FOLDER):
            return None
        if event == "line":
            self.lines.append((frame.f_code.co_filename, frame.f_lineno))
            if len(self.lines) - 1 == self.interrupted:
                raise KeyboardInterrupt
        return self


def enter_and_leave(knobs: Knobs, model: nn.Module, interrupted: int | None = None) -> list[tuple[str, int]]:
    """Apply knobs to a model, with an interrupt at one line; return the lines that ran."""
    lines = Lines(interrupted)

    def run() -> None:
        with apply(knobs, model):
            pass

    with contextlib.suppress(KeyboardInterrupt):
        traced(run, lines)
    return lines.lines


def small() -> nn.Module:
    torch.manual_seed(0)
    block = nn.Sequential(nn.Conv2d(2, 2, 1), nn.BatchNorm2d(2), nn.ReLU())
    other = nn.Sequential(nn.Conv2d(2, 2, 1), nn.BatchNorm2d(2), nn.ReLU())
    model = nn.Sequential(block, other, nn.Flatten(), nn.Linear(8, 2))
    model[1].eval()
    model[1].gradient_checkpointing = True
    model[3].weight.grad = torch.ones(2, 8)
    model[3].bias.requires_grad_(False)
    return model


def state(model: nn.Module) -> dict[str, Any]:
    """Return everything that `apply` may change."""
    return everything(model) | {
        "forwards": [vars(module).get("forward") for module in model.modules()],
        "flags": [vars(module).get("gradient_checkpointing") for module in model.modules()],
        "checkpoint": dict(vars(torch.utils.checkpoint)),
        "saved tensor hooks": torch._C._autograd._top_saved_tensors_default_hooks(True),
        "observed": set(legal._observed),
        "scopes": scopes(),
        "gradients": torch.is_grad_enabled(),
    }


@pytest.mark.parametrize(
    "knobs",
    [
        Knobs(frozen="0"),
        Knobs(lora="3", lora_rank=1),
        Knobs(memory_format="channels last"),
        Knobs(inplace="on"),
        Knobs(offload="saved tensors on the CPU"),
        Knobs(checkpoint="none"),
        Knobs(checkpoint="every 1"),
        Knobs(checkpoint="sqrt"),
        Knobs(checkpoint="keep matmuls"),
        Knobs(checkpoint="layers 1"),
        Knobs(checkpoint="norms"),
        Knobs(precision="bf16"),
        Knobs(precision="off"),
        Knobs(precision="all bf16"),
        Knobs(mode="inference"),
        Knobs(frozen="0", inplace="off", checkpoint="sqrt", precision="all bf16", memory_format="channels last"),
    ],
    ids=str,
)
def test_an_interrupt_at_any_line_leaves_nothing_changed(knobs: Knobs) -> None:
    model = small()
    before = state(model)
    lines = enter_and_leave(knobs, model)
    assert state(model) == before
    first = {line: number for number, line in reversed(list(enumerate(lines)))}
    last = {line: number for number, line in enumerate(lines)}
    for number in sorted({*first.values(), *last.values()}):
        enter_and_leave(knobs, model, number)
        assert state(model) == before, f"interrupted at {lines[number]}"
