"""Shape rules give the same plans as torch's fake kernels."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import memexplore as mx
from memexplore.virtual_gpu.device import active
from memexplore.virtual_gpu.dispatch import fake_kernels, shape_rules
from tests.models import MODELS


def step_of(name: str, **autocast: Any) -> Callable[[], None]:
    build, make, loss = MODELS[name]

    def step() -> None:
        model = build().cuda()
        with torch.autocast("cuda", **autocast):
            value = loss(model, make("cuda"))
        value.backward()
        torch.optim.AdamW(model.parameters()).step()

    return step


def odd_shapes() -> None:
    """Views, broadcasts and memory formats beyond those of ordinary models."""
    images = torch.randn(2, 6, 4, 4, device="cuda").to(memory_format=torch.channels_last).requires_grad_()
    norm = nn.BatchNorm2d(6).cuda()
    norm(images).relu().sum().backward()
    norm.eval()
    norm(images).sum().backward()
    norm(images[:, :, ::2]).sum().backward()
    column, row = torch.randn(5, 1, device="cuda"), torch.randn(1, 7, device="cuda", dtype=torch.float16)
    (column * row).t().contiguous().view(-1)[3:9:2].add_(1).sum()
    torch.cat([column, column.double()], 1).softmax(0).mean(dim=1, keepdim=True)
    grid = torch.randn(3, 4, 5, device="cuda").transpose(0, 2)
    torch.relu(grid) + grid.expand(2, 5, 4, 3).sum((0, 1))
    torch.bmm(grid, grid.transpose(1, 2)).select(1, 0).unsqueeze(0).squeeze(0)
    grid.neg().div(2.0).sub(1).exp().split(2)
    nn.BatchNorm1d(4).cuda()(grid).sum()
    rows = torch.randn(4, 5, 6, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    for weights in (nn.LayerNorm(6), nn.LayerNorm(6, bias=False), nn.LayerNorm((5, 6), elementwise_affine=False)):
        layer = weights.cuda().bfloat16()
        (layer(rows) * 2).sum().backward()
        if layer.normalized_shape == (6,):
            layer(rows.transpose(0, 1)).sum().backward()
    for images in (rows[..., None], torch.randn(2, 5, 3, 3, device="cuda", dtype=torch.bfloat16)):
        half = nn.BatchNorm2d(5).cuda()
        (half(images.detach().requires_grad_()) * 2).sum().backward()
        half.eval()(images.contiguous(memory_format=torch.channels_last)).sum()


STEPS = {
    "resnet50": step_of("resnet50", enabled=False),
    "unet in fp16": step_of("unet", dtype=torch.float16),
    "gpt2 in bf16": step_of("gpt2", dtype=torch.bfloat16),
    "bert": step_of("bert", enabled=False),
    "odd shapes": odd_shapes,
}


def plans_of(step: Callable[[], None]) -> dict[Any, tuple[Any, ...]]:
    with mx.virtual("24GiB"):
        device = active()
        assert device is not None
        device.mode._plans = {}
        step()
        return {
            key: (plan.outputs, plan.returns, plan.requests, plan.uses_cublas)
            for key, plan in device.mode._plans.items()
        }


@pytest.mark.parametrize("name", STEPS)
def test_shape_rules_give_the_plans_of_the_fake_kernels(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    by_rules = plans_of(STEPS[name])
    monkeypatch.setattr(shape_rules, "_OUTPUTS", {})
    monkeypatch.setattr(shape_rules, "COMPILED", frozenset())
    by_fake_kernels = plans_of(STEPS[name])
    assert by_rules.keys() == by_fake_kernels.keys()
    for key, plan in by_rules.items():
        assert plan == by_fake_kernels[key], key


def test_shape_rules_replace_fake_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    executed = []
    original = fake_kernels.execute
    monkeypatch.setattr(fake_kernels, "execute", lambda func, *rest: executed.append(func) or original(func, *rest))
    plans_of(odd_shapes)
    assert not shape_rules.COMPILED & set(executed)
    assert torch.ops.aten.cudnn_batch_norm.default not in executed
    assert torch.ops.aten.native_layer_norm.default in executed  # that of a transposed tensor has no rule
