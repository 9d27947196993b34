"""The traceback of a virtual out-of-memory error has the lines of the user and of torch, as on a GPU."""

from __future__ import annotations

import os
import traceback
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

import memexplore

PACKAGE = os.path.dirname(memexplore.__file__)


def _forward() -> None:
    layer, x = nn.Linear(512, 512, device="cuda"), torch.zeros(2048, 512, device="cuda")
    outputs = [x]
    while True:
        outputs.append(layer(outputs[-1]))


def _backward() -> None:
    # 16 MiB of x and 16 of its gradient
    torch.zeros(1 << 22, device="cuda", requires_grad=True).exp().exp().sum().backward()


def _recomputed() -> None:
    x = torch.zeros(1 << 22, device="cuda", requires_grad=True)
    checkpoint(lambda x: x.exp().exp() * x.new_ones(1), x, use_reentrant=True).sum().backward()


def _moved() -> None:
    nn.Linear(8192, 8192).cuda()


def _made() -> None:
    torch.zeros(1 << 28, device="cuda")


def _copied() -> None:
    torch.zeros(1 << 26).to("cuda")


def _stepped() -> None:
    weight = torch.zeros(1 << 22, device="cuda", requires_grad=True)
    weight.grad = torch.zeros_like(weight)
    torch.optim.Adam([weight]).step()


STEPS: list[Callable[[], None]] = [_forward, _backward, _recomputed, _moved, _made, _copied, _stepped]


def _failure(step: Callable[[], None]) -> torch.OutOfMemoryError:
    with memexplore.virtual("50MiB"), pytest.raises(torch.OutOfMemoryError) as caught:
        step()
    return caught.value


@pytest.mark.parametrize("step", STEPS)
def test_no_line_of_this_package_is_in_the_traceback(step: Callable[[], None]) -> None:
    names = _files(_failure(step))
    assert names.count(__file__) >= 2
    assert [name for name in names if name.startswith(PACKAGE)] == []


@pytest.mark.parametrize("step", STEPS)
def test_the_error_is_that_of_pytorch(step: Callable[[], None]) -> None:
    error = _failure(step)
    assert type(error) is torch.OutOfMemoryError
    assert str(error).startswith("CUDA out of memory. Tried to allocate ")
    assert error.__context__ is error.__cause__ is None


def _files(error: BaseException) -> list[str]:
    return [frame.filename for frame in traceback.extract_tb(error.__traceback__)]


def test_a_watched_model_adds_no_line() -> None:
    def train() -> None:
        layer = nn.Linear(512, 512, device="cuda")
        outputs = [torch.zeros(2048, 512, device="cuda")]
        with memexplore.watch(layer, torch.optim.SGD(layer.parameters())):
            while True:
                outputs.append(layer(outputs[-1]))

    assert [name for name in _files(_failure(train)) if name.startswith(PACKAGE)] == []


def test_a_recording_of_a_real_device_adds_no_line() -> None:
    class Full(TorchDispatchMode):
        """Below the recording, as the allocator of a GPU is."""

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            raise torch.OutOfMemoryError("CUDA out of memory.")

    with Full(), pytest.raises(torch.OutOfMemoryError) as caught, memexplore.record(device="cpu"):
        torch.zeros(8)
    assert [name for name in _files(caught.value) if name.startswith(PACKAGE)] == []


def test_an_error_whose_traceback_is_dropped_holds_no_tensor() -> None:
    kept: list[BaseException] = []

    def step() -> None:
        outputs = [torch.zeros(1 << 20, device="cuda")]
        while True:
            outputs.append(outputs[-1].exp())

    with memexplore.virtual("50MiB"):
        try:
            step()
        except torch.OutOfMemoryError as error:
            kept.append(error.with_traceback(None))
        assert torch.cuda.memory_allocated() == 0
