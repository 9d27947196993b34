"""A setting applied to a live model: what is changed, what is left to the code, and how it is undone."""

from __future__ import annotations

import pathlib

import pytest
import torch
from torch import nn

import memexplore
from memexplore.jupyter.applied_setting import GONE, AppliedSetting, parts_of, why_not
from memexplore.run.knobs.knobs import Knobs
from tests.interrupts import interrupted

PACKAGE = str(pathlib.Path(memexplore.__file__).parent)


def blocks() -> nn.Sequential:
    return nn.Sequential(*(nn.Sequential(nn.Linear(8, 8), nn.ReLU()) for _ in range(4)))


def state_of(model: nn.Module) -> list[tuple[list[str], int]]:
    return [(sorted(vars(each)), len(each._forward_pre_hooks)) for each in model.modules()]


def test_checkpoints_are_of_the_model_and_a_batch_is_of_the_code():
    parts = parts_of(Knobs(checkpoint="every 1", precision="bf16", batch=2, accumulation=4), [blocks()])
    assert parts.of_model == Knobs(checkpoint="every 1", precision="bf16")
    assert parts.of_code == Knobs(batch=2, accumulation=4)


def test_fp16_and_weights_in_bf16_are_of_the_code():
    # fp16 needs a GradScaler in the loop, and weights of another dtype another optimizer.
    for precision in ("fp16", "all bf16"):
        assert parts_of(Knobs(precision=precision), [blocks()]).of_model == Knobs()


def test_gradients_with_checkpoints_are_the_same():
    model, x = blocks(), torch.randn(3, 8)
    model(x).sum().backward()
    before = [weight.grad.clone() for weight in model.parameters()]
    model.zero_grad()
    applied = AppliedSetting()
    applied.apply(Knobs(checkpoint="every 1"), [model])
    model(x).sum().backward()
    applied.undo()
    assert all(torch.equal(weight.grad, grad) for weight, grad in zip(model.parameters(), before, strict=True))


def test_a_model_that_is_gone_or_compiled_is_not_changed():
    assert why_not(Knobs(checkpoint="every 1"), [], "").startswith(GONE)
    compiled = torch.compile(blocks())
    assert "compiled" in why_not(Knobs(checkpoint="every 1"), [compiled], "")
    with pytest.raises(ValueError, match="compiled"):
        AppliedSetting().apply(Knobs(checkpoint="every 1"), [compiled])


def test_an_interrupt_at_any_line_is_undone():
    model = blocks()
    before, number = state_of(model), 0
    while True:
        applied = AppliedSetting()
        line = interrupted(lambda applied=applied: applied.apply(Knobs(checkpoint="every 1"), [model]), number, PACKAGE)
        applied.undo()
        assert state_of(model) == before
        if line is None:
            break
        number += 1
    assert number > 50
