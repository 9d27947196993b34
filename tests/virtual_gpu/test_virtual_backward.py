"""Python code that runs inside a backward pass finds the virtual device by its name, as in the forward pass."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from memexplore.run.machine import virtual


@pytest.fixture
def gpu() -> Iterator[None]:
    with virtual("T4"):
        yield


on_gpu = pytest.mark.usefixtures("gpu")

# Ways in which the code of a layer comes by a tensor on the GPU.
MAKES: list[Callable[[torch.Tensor], torch.Tensor]] = [
    lambda x: torch.zeros(2, device="cuda"),
    lambda x: torch.zeros(2, device=x.device),
    lambda x: torch.arange(2, device=torch.device("cuda", 0)),
    lambda x: torch.ones(2).cuda(),
    lambda x: torch.tensor([1.0, 2.0]).to("cuda"),
    lambda x: torch.tensor([1.0, 2.0], device=x.device),
    lambda x: x.new(2),
]


def _method(loss: torch.Tensor) -> None:
    loss.backward()


def _function(loss: torch.Tensor) -> None:
    torch.autograd.backward(loss)


@on_gpu
@pytest.mark.parametrize("backward", [_method, _function])
@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("make", MAKES)
def test_a_checkpoint_recomputes_code_that_names_the_device(
    make: Callable[[torch.Tensor], torch.Tensor], reentrant: bool, backward: Callable[[torch.Tensor], None]
) -> None:
    x = torch.ones(2, device="cuda", requires_grad=True)
    backward(checkpoint(lambda x: (x + make(x)).sin(), x, use_reentrant=reentrant).sum())
    assert x.grad.is_cuda


@on_gpu
@pytest.mark.parametrize("make", MAKES)
def test_the_backward_of_a_function_may_name_the_device(make: Callable[[torch.Tensor], torch.Tensor]) -> None:
    class Twice(torch.autograd.Function):
        @staticmethod
        def forward(context: Any, x: torch.Tensor) -> torch.Tensor:
            return x * 2

        @staticmethod
        def backward(context: Any, gradient: torch.Tensor) -> torch.Tensor:
            return gradient * 2 + make(gradient)

    x = torch.ones(2, device="cuda", requires_grad=True)
    (gradient,) = torch.autograd.grad(Twice.apply(x).sum(), x)
    assert gradient.is_cuda


@on_gpu
@pytest.mark.parametrize("make", MAKES)
def test_a_hook_may_name_the_device(make: Callable[[torch.Tensor], torch.Tensor]) -> None:
    x = torch.ones(2, device="cuda", requires_grad=True)
    x.register_hook(lambda gradient: gradient + make(gradient))
    (x * 2).sum().backward()
    assert x.grad.is_cuda


def test_the_autograd_engine_is_restored() -> None:
    own = torch.autograd._engine_run_backward
    with virtual("T4"):
        assert torch.autograd._engine_run_backward is not own
    assert torch.autograd._engine_run_backward is own
