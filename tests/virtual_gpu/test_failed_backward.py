"""A backward pass that runs out of memory frees its graph at once, as on a GPU, whoever started it."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.utils.checkpoint import checkpoint

import memexplore
from memexplore.virtual_gpu.patches import failed_backward

MIB = 1 << 20
Pass = Callable[[torch.Tensor, torch.Tensor], Any]


class _Large(torch.autograd.Function):
    """A copy whose backward requests 1 GiB."""

    @staticmethod
    def forward(context: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(context: Any, gradient: torch.Tensor) -> Any:
        torch.empty(1 << 30, dtype=torch.uint8, device="cuda")
        return gradient


def _loss(x: torch.Tensor) -> torch.Tensor:
    """Six results of 4 MiB that are saved; the engine calls `_Large`, the last node made, before their nodes."""
    saved = [x.exp() for _ in range(6)]
    return (torch.stack([each.sum() for each in saved]).sum() + _Large.apply(x).sum()).sin()


def _in_thread(loss: torch.Tensor, x: torch.Tensor) -> None:
    failures: list[BaseException] = []

    def run(loss: torch.Tensor) -> None:
        try:
            loss.backward()
        except torch.OutOfMemoryError as error:
            failures.append(error.with_traceback(None))

    thread = threading.Thread(target=run, args=(loss,))
    thread.start()
    thread.join()
    del thread, loss
    raise failures[0]


PASSES: dict[str, Pass] = {
    "backward": lambda loss, x: loss.backward(),
    "retain_graph": lambda loss, x: loss.backward(retain_graph=True),
    "create_graph": lambda loss, x: loss.backward(create_graph=True),
    "grad": lambda loss, x: torch.autograd.grad(loss, x),
    "double backward": lambda loss, x: torch.autograd.grad(loss * loss, loss, create_graph=True)[0].backward(),
    "thread": _in_thread,
}


def allocated_after(step: Callable[[torch.Tensor], object]) -> int:
    """Return the bytes that a step of a tensor of 4 MiB leaves when it runs out of memory."""
    with memexplore.virtual("200MiB"):
        x = torch.zeros(MIB, device="cuda", requires_grad=True)
        with pytest.raises(torch.OutOfMemoryError):
            step(x)
        x.grad = None
        return torch.cuda.memory_allocated()


@pytest.mark.parametrize("name", PASSES)
def test_nothing_of_the_graph_stays_alive(name: str) -> None:
    assert allocated_after(lambda x: PASSES[name](_loss(x), x)) == 4 * MIB


@pytest.mark.parametrize("reentrant", [True, False])
def test_nothing_of_a_checkpoint_stays_alive(reentrant: bool) -> None:
    assert allocated_after(lambda x: (checkpoint(_loss, x, use_reentrant=reentrant) + _loss(x)).backward()) == 4 * MIB


def test_a_pass_that_catches_the_error_of_an_inner_one_goes_on() -> None:
    class Trying(torch.autograd.Function):
        @staticmethod
        def forward(context: Any, x: torch.Tensor) -> torch.Tensor:
            context.save_for_backward(x)
            return x.clone()

        @staticmethod
        def backward(context: Any, gradient: torch.Tensor) -> Any:
            (x,) = context.saved_tensors
            with torch.enable_grad(), pytest.raises(torch.OutOfMemoryError):
                _loss(x.detach().requires_grad_()).backward()
            return gradient

    with memexplore.virtual("200MiB"):
        x = torch.zeros(MIB, device="cuda", requires_grad=True)
        Trying.apply(x).sum().backward()
        # x and its gradient: a sum's gradient has strides of 0, and is made contiguous
        assert torch.cuda.memory_allocated() == 8 * MIB


def test_an_error_of_another_kind_frees_the_graph_as_well() -> None:
    def fail(gradient: torch.Tensor) -> None:
        raise ValueError

    def step(x: torch.Tensor) -> None:
        saved = [x.exp() for _ in range(6)]
        last = x.clone()
        last.register_hook(fail)
        (torch.stack([each.sum() for each in saved]).sum() + last.sum()).backward()

    with memexplore.virtual("200MiB"):
        x = torch.zeros(MIB, device="cuda", requires_grad=True)
        with pytest.raises(ValueError):
            step(x)
        x.grad = None
        assert torch.cuda.memory_allocated() == 4 * MIB


def test_emptying_the_queue_calls_no_operator() -> None:
    called: list[Any] = []

    class Noting(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            called.append(func)
            return func(*args, **(kwargs or {}))

    with Noting(), torch.no_grad():
        failed_backward._empty_queue()
    assert called == []


def test_the_next_run_of_a_step_has_the_tape_of_the_first() -> None:
    def tape(capacity: str) -> memexplore.Tape:
        x = torch.zeros(MIB, requires_grad=True)
        return memexplore.simulate(lambda: _loss(x.cuda()).backward(), gpu=capacity)

    first, failed, again = [tape(capacity) for capacity in ("2GiB", "200MiB", "2GiB")]
    assert len(failed) < len(first)
    assert again.equals(first)
