"""Lazy modules: their parameters get memory on the virtual GPU in the first forward pass, and are lazy again after."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.nn.parameter import is_lazy

import memexplore as mx
from memexplore.analysis import curves
from memexplore.tape import Category
from memexplore.torch_internals.modules import HOOKS_BEFORE_FORWARD, buffers_of, parameters_of
from tests.small import allocated


def network() -> nn.Sequential:
    layers = [nn.LazyConv2d(8, 3), nn.LazyBatchNorm2d(), nn.ReLU(), nn.Flatten(), nn.LazyLinear(10)]
    return nn.Sequential(*layers)


def state(model: nn.Module) -> list[tuple[object, ...]]:
    """Classes, hooks and kinds of tensors of each module."""
    return [
        (
            type(module),
            [len(module.__dict__[name]) for name in HOOKS_BEFORE_FORWARD],
            sorted(module.__dict__),
            [type(value) for value in (*parameters_of(module).values(), *buffers_of(module).values())],
        )
        for module in model.modules()
    ]


def test_the_first_forward_pass_allocates() -> None:
    with mx.virtual("T4", release="2.13"):
        layer = nn.LazyLinear(128, bias=False).cuda()
        assert allocated() == 0
        x = torch.ones(4, 256, device="cuda")
        before = allocated()
        with torch.no_grad():
            layer(x)
        workspace = 8_519_680
        assert allocated() - before - workspace == 128 * 256 * 4


@pytest.mark.parametrize(
    "make",
    [
        lambda: network().cuda(),
        lambda: network().to("cuda", torch.float32),
        lambda: nn.Sequential(nn.LazyConv2d(8, 3, device="cuda"), nn.Flatten(), nn.LazyLinear(10, device="cuda")),
    ],
)
def test_a_lazy_model_trains(make: Callable[[], nn.Sequential]) -> None:
    with mx.virtual("T4"):
        model = make()
        model(torch.randn(2, 3, 8, 8, device="cuda")).sum().backward()
        torch.optim.Adam(model.parameters()).step()
        assert all(parameter.is_cuda and parameter.grad is not None for parameter in model.parameters())
        assert type(model[-1]) is nn.Linear


def test_an_optimizer_made_before_the_first_forward_pass_has_the_parameters() -> None:
    with mx.virtual("T4"):
        model = network().cuda()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        model(torch.randn(2, 3, 8, 8, device="cuda")).sum().backward()
        assert [p.grad is not None for p in optimizer.param_groups[0]["params"]] == [True] * 6


def test_the_device_of_an_uninitialized_parameter_is_the_gpu() -> None:
    with mx.virtual("T4"):
        model = network().cuda()
        assert str(next(model.parameters()).device) == "cuda:0"
        assert model.half()[0].weight.dtype is torch.float16
        assert model.cpu()[0].weight.device.type == "cpu"
        model(torch.randn(2, 3, 8, 8).half())
        assert allocated() == 0


def test_with_a_default_device_too() -> None:
    with mx.virtual("T4"), torch.device("cuda"):
        model = network()
        assert model(torch.randn(2, 3, 8, 8)).is_cuda


def test_the_users_model_is_lazy_again_afterwards() -> None:
    model = network()
    before = state(model)
    with mx.virtual("T4"):
        model.cuda()(torch.randn(2, 3, 8, 8, device="cuda")).sum().backward()
    assert state(model) == before
    assert model(torch.randn(2, 3, 6, 6)).shape == (2, 10)


def test_a_model_that_only_moved_is_lazy_again_too() -> None:
    model = network()
    with mx.virtual("T4"):
        model.cuda()
    assert all(is_lazy(parameter) and parameter.device.type == "cpu" for parameter in model.parameters())


def test_a_copy_of_a_lazy_model_is_lazy_on_the_same_device() -> None:
    with mx.virtual("T4"):
        model = copy.deepcopy(nn.Sequential(nn.LazyLinear(8), nn.ReLU(), nn.LazyLinear(2)).cuda())
        assert {str(parameter.device) for parameter in model.parameters()} == {"cuda:0"}
        assert model(torch.randn(2, 3, device="cuda")).is_cuda


def test_a_recording_tags_the_parameters_once_they_have_memory() -> None:
    def train() -> None:
        model = nn.LazyLinear(256).cuda()
        model(torch.randn(2, 512, device="cuda")).sum().backward()

    tape = mx.simulate(train, gpu="T4")
    # weight 256 x 512 x 4 B and bias 256 x 4 B
    assert curves.by_category(tape)[Category.PARAMETER].max() == 256 * 512 * 4 + 256 * 4
