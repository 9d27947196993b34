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


def odd_convolutions() -> None:
    """Strides, windows, groups and memory formats beyond those of ordinary models."""
    images = torch.randn(2, 6, 9, 8, device="cuda", requires_grad=True)
    for layer in (
        nn.Conv2d(6, 4, 3, stride=(2, 1), padding=(0, 2), dilation=2),
        nn.Conv2d(6, 4, (1, 2), bias=False, groups=2),
        nn.Conv2d(6, 6, 3, groups=6),
        nn.Conv2d(6, 1, 1),
        nn.ConvTranspose2d(6, 2, 3, stride=2),
    ):
        weights = layer.cuda()
        (weights(images) * 2).sum().backward()
        weights(images.detach().contiguous(memory_format=torch.channels_last)).sum().backward()
        weights(images[:, :, ::2].detach()).sum()
    nn.Conv2d(1, 3, 2).cuda()(images[:, :1]).sum().backward()
    nn.Conv2d(6, 3, 3, padding=1).cuda()(images[0]).sum().backward()
    nn.Conv2d(6, 3, 3).cuda()(torch.empty(0, 6, 5, 5, device="cuda"))
    frozen = nn.Conv2d(6, 3, 3).cuda().requires_grad_(False)
    frozen(images).sum().backward()
    nn.Conv3d(2, 3, 2).cuda()(torch.randn(1, 2, 3, 4, 5, device="cuda")).sum().backward()
    nn.Conv1d(9, 3, 2).cuda()(images[0]).sum().backward()


def odd_losses() -> None:
    """Reductions, weights of classes, class numbers and embeddings beyond those of ordinary models."""
    scores = torch.randn(6, 5, device="cuda", requires_grad=True)
    classes = torch.zeros(6, dtype=torch.int64, device="cuda")
    for reduction in ("none", "mean", "sum"):
        nn.functional.cross_entropy(scores, classes, reduction=reduction).sum().backward()
        nn.functional.nll_loss(scores.t().contiguous().t(), classes, reduction=reduction).sum().backward()
    nn.functional.nll_loss(scores, classes, torch.ones(5, device="cuda")).backward()
    nn.functional.nll_loss(scores[0], classes[0]).backward()
    table = nn.Embedding(5, 4, padding_idx=0).cuda()
    for rows in (classes, classes[::2], classes[0], classes.int(), classes.view(2, 3).t()):
        (table(rows) * 2).sum().backward()
    torch.native_dropout(scores, 0.5, True)[0].sum().backward()
    torch.native_dropout(scores.t(), 0.25, True)[0].sum().backward()
    (scores[1:3, ::2].t() * 2).sum().backward()
    scores.select(1, 2).sum().backward()


def odd_products() -> None:
    """Strides, batches, biases and softmaxes beyond those of ordinary models."""
    rows, other = torch.randn(3, 4, device="cuda"), torch.randn(4, 4, device="cuda", dtype=torch.float16)
    for left, right in ((rows, rows.t()), (rows[:, ::2], rows.t()[::2]), (other.t(), other), (rows[:0], rows.t())):
        left @ right, torch.bmm(left[None], right.expand(1, *right.shape))
        for bias in (right[0], left[:, :1] @ right[:1], right.new_ones(()), right.new_ones(1)):
            torch.addmm(bias, left, right), torch.addmm(bias, left, right, beta=2)
    for source in (rows, rows.t(), other, rows[:, ::2], rows[0], rows.new_ones(()), rows[None, None, :0]):
        for function in (torch.softmax, torch.log_softmax):
            for dtype in (None, torch.float32, torch.float64):
                function(source.detach().requires_grad_(), -1, dtype=dtype).sum().backward()
                function(source.detach().requires_grad_(), 0, dtype=dtype).exp().sum().backward()


def odd_elements() -> None:
    """Elementwise ops on other dtypes, numbers, broadcasts and strides than those of ordinary models."""
    whole, flag = torch.ones(3, 4, device="cuda", dtype=torch.int32), torch.ones(3, 4, device="cuda").bool()
    real, half = torch.randn(3, 4, device="cuda"), torch.randn(3, 4, device="cuda").half()
    for other in (whole, flag, half, real.double(), real[0], real[:, :1], real.t().contiguous().t(), 2, 2.5, True, 1j):
        real * other, real + other, other - real, half / other, half - other
    for source in (whole, real, half, real.t(), real[:, ::2], real.expand(2, 3, 4), real[..., None], real.new_empty(0)):
        source**2, source**0.5, source**2.0, source.sigmoid(), source.cos(), source.relu(), -source
        source.new_empty(3, 4).set_(source).mul(2)
    single = torch.empty_strided((3, 1), (1, 7), device="cuda")
    single.relu(), single * single, single.exp()
    torch.add(real, real, alpha=2), torch.sub(real, half, alpha=0.5)
    grown = torch.randn(3, 4, device="cuda", requires_grad=True)
    for shape in ((3, 4), (4, 3), (1, 12)):
        for function in (torch.sigmoid, torch.tanh, torch.relu, nn.functional.silu, nn.functional.gelu):
            function(grown.reshape(shape)).t().sum().backward()


STEPS = {
    "resnet50": step_of("resnet50", enabled=False),
    "unet in fp16": step_of("unet", dtype=torch.float16),
    "gpt2 in bf16": step_of("gpt2", dtype=torch.bfloat16),
    "bert": step_of("bert", enabled=False),
    "odd shapes": odd_shapes,
    "odd convolutions": odd_convolutions,
    "odd losses": odd_losses,
    "odd products": odd_products,
    "odd elements": odd_elements,
}


def plans_of(step: Callable[[], None]) -> dict[Any, tuple[Any, ...]]:
    with mx.virtual("24GiB"):
        device = active()
        assert device is not None
        device.mode._plans = {}
        step()
        return {
            key: (plan.outputs, plan.returns, plan.requests, plan.libraries) for key, plan in device.mode._plans.items()
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
    original = fake_kernels.fake_dispatch

    def noting(mode: Any, func: Any, *rest: Any) -> Any:
        executed.append(func)
        return original(mode, func, *rest)

    monkeypatch.setattr(fake_kernels, "fake_dispatch", noting)
    plans_of(odd_shapes)
    assert not shape_rules.COMPILED & set(executed)
    assert torch.ops.aten.cudnn_batch_norm.default not in executed
    assert torch.ops.aten.native_layer_norm.default in executed  # that of a transposed tensor has no rule
