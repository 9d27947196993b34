"""Expressions for repeated blocks: they evaluate to the modules that they stand for, in order."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from memexplore.run.code.lines import lines
from memexplore.run.knobs.checkpoints.block_names import blocks_expression
from memexplore.run.knobs.knobs import Knobs
from memexplore.run.programs.step import Step


def tower() -> nn.Module:
    """Return blocks in a list, in sequences of a list, and with another kind of layer behind them."""
    blocks = nn.ModuleDict({"h": nn.ModuleList(nn.Linear(2, 2) for _ in range(6))})
    blocks["stages"] = nn.ModuleList(nn.Sequential(*(nn.Linear(2, 2) for _ in range(3))) for _ in range(2))
    blocks["head"] = nn.Sequential(*(nn.Linear(2, 2) for _ in range(4)), nn.ReLU())
    return blocks


@pytest.mark.parametrize(
    ("names", "text"),
    [
        ([f"h.{n}" for n in range(6)], "model.h"),
        ([f"h.{n}" for n in (0, 2, 4)], "model.h[::2]"),
        ([f"h.{n}" for n in (1, 2, 3)], "model.h[1:4]"),
        ([f"head.{n}" for n in range(4)], "model.head[:4]"),
        ([f"stages.{s}.{n}" for s in (0, 1) for n in range(3)], "[*model.stages[0], *model.stages[1]]"),
    ],
)
def test_repeated_blocks_are_one_loop(names: list[str], text: str) -> None:
    model = tower()
    assert blocks_expression(model, tuple(names)) == text
    assert list(eval(text, {"model": model})) == [model.get_submodule(name) for name in names]


@pytest.mark.parametrize(
    "names", [("h.0", "h.1"), ("h.0", "h.1", "h.3"), ("h.2", "h.1", "h.0"), ("h.0", "h.1", "head.4")]
)
def test_other_modules_are_named(names: tuple[str, ...]) -> None:
    assert blocks_expression(tower(), names) == ""


@given(
    st.permutations([*(f"h.{n}" for n in range(6)), *(f"stages.{s}.{n}" for s in (0, 1) for n in range(3))]), st.data()
)
def test_an_expression_stands_for_its_names_in_their_order(names: list[str], data: st.DataObject) -> None:
    model = tower()
    some = tuple(names[: data.draw(st.integers(3, len(names)))])
    for chosen in (some, tuple(sorted(some))):
        if text := blocks_expression(model, chosen):
            assert list(eval(text, {"model": model})) == [model.get_submodule(name) for name in chosen]


def test_checkpoints_of_repeated_blocks_are_a_loop() -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.h = nn.ModuleList(nn.Sequential(nn.Linear(4, 4), nn.GELU()) for _ in range(12))

        def forward(self, value: object) -> object:
            for block in self.h:
                value = block(value)
            return value

    step = Step(Net(), torch.ones(2, 4), loss=torch.mean)
    assert "for block in model.h[::2]:" in lines(step, Knobs(checkpoint="every 2"))
