"""Interrupts of `mx.virtual`: Ctrl-C at any line of switching on or off leaves torch and user objects restored."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn

import memexplore as mx
from memexplore.virtual_gpu import device
from memexplore.virtual_gpu.patches import module_moves
from tests.interrupts import LAST, interrupted, interrupts, lines_of
from tests.virtual_gpu.torch_state import functions, global_state


@pytest.fixture(autouse=True)
def no_collection() -> Iterator[None]:
    """Keep finalizers of earlier tests from running, which are lines of their own."""
    gc.collect()
    gc.disable()
    yield
    LAST.clear()
    gc.enable()


def _block() -> None:
    with mx.virtual("T4"):
        pass


def test_torch_is_restored_after_an_interrupt_at_any_line_of_switching_on_and_off():
    _block()  # imports what torch imports lazily
    before, every_function = global_state(), functions()
    left = []
    for line in interrupts(_block):
        if global_state() != before:
            left.append(line)
            device.turn_off()
    assert left == []
    assert functions() == every_function


def test_interrupted_lines_include_those_of_the_standard_library():
    files = {line.filename for line in lines_of(_block)}
    assert {device.__file__, device.install.__file__} < files
    assert any(name.endswith("functools.py") for name in files)


def _model() -> nn.Module:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(2, 2, bias=False), nn.BatchNorm1d(2))
    model(torch.ones(3, 2)).sum().backward()
    model[0].weight.tagged = "mine"
    return model


def _contents(model: nn.Module) -> list[Any]:
    return [
        (name, id(tensor), type(tensor), tensor.device, dict(vars(tensor)), tensor.detach().numpy().tobytes())
        for name, tensor in [*model.named_parameters(), *model.named_buffers()]
    ] + [(id(parameter.grad), parameter.grad.numpy().tobytes()) for parameter in model.parameters()]


def test_a_model_is_restored_after_an_interrupt_of_its_move():
    model = _model()
    mx.simulate(model.cuda)
    before = _contents(model)
    number = 0
    while True:
        with mx.virtual("T4"):
            line = interrupted(lambda: model.cuda(), number, module_moves.__file__)
        # `with torch.no_grad()` is no safer than anywhere else.
        torch.set_grad_enabled(True)
        assert _contents(model) == before, line
        if line is None:
            break
        number += 1
    assert number > 100


def _train(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    torch.set_default_device("cuda")
    model.cuda()(torch.ones(3, 2)).sum().backward()
    optimizer.step()
    torch.compile(model, disable=True)


def _while_it_ends(use: Callable[[], object], check: Callable[[], None]) -> int:
    """Interrupt the end of a block at each of its lines, and check each time; return the number of lines."""
    number = 0
    while True:
        block = mx.virtual("T4")
        block.__enter__()
        use()
        line = interrupted(lambda block=block: block.__exit__(None, None, None), number)
        check()
        if line is None:
            return number
        number += 1


# Python drops an interrupt in the callback of a weak reference.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.filterwarnings("ignore:Using `torch.compile")
def test_changes_of_the_block_are_restored_after_an_interrupt_at_any_line_of_switching_off():
    model = _model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    mx.simulate(lambda: _train(model, optimizer))
    contents, every_function, before = _contents(model), functions(), global_state()

    def check() -> None:
        assert global_state() == before
        assert _contents(model) == contents
        assert not optimizer.state

    assert _while_it_ends(lambda: _train(model, optimizer), check) > 100
    assert functions() == every_function


@pytest.mark.filterwarnings("ignore:Using `torch.compile")
def test_stance_of_the_compiler_is_restored_after_an_interrupt_at_any_line_of_switching_off():
    mx.simulate(lambda: torch.compile(torch.sin))
    stance = torch._dynamo.eval_frame._stance

    def check() -> None:
        assert torch._dynamo.eval_frame._stance == stance

    assert _while_it_ends(lambda: torch.compile(torch.sin), check) > 100
