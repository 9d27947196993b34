"""FLOPs and seconds of a step, by hand."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional

import memexplore as mx
from memexplore import gpu_catalogue
from memexplore.steps.cost import Cost, measuring
from memexplore.virtual_gpu.device import active
from memexplore.virtual_gpu.dispatch.work import LAUNCH, PCIE, Work


def cost_of(function) -> Cost:
    with mx.virtual("A100"):
        device = active()
        assert device is not None
        with measuring(device.mode) as meter:
            function()
    return meter.total()


def test_a_product_of_matrices():
    a, b = (3, 5), (5, 7)
    cost = cost_of(lambda: torch.zeros(a, device="cuda") @ torch.zeros(b, device="cuda"))
    assert cost.flops == 2 * 3 * 5 * 7


def test_a_convolution_and_its_backward():
    def step() -> None:
        images = torch.zeros(2, 3, 8, 8, device="cuda", requires_grad=True)
        nn.Conv2d(3, 4, 3, padding=1).cuda()(images).sum().backward()

    # 2*8*8 outputs of each channel, 4 x 3 x 3*3 multiply-adds each; backward takes as many for input and for weight
    assert cost_of(step).flops == 3 * 2 * (2 * 8 * 8) * (4 * 3 * 3 * 3)


@pytest.mark.parametrize("keys", [8, 2], ids=["one key per head", "shared keys"])
def test_attention_and_its_backward(keys):
    def step() -> None:
        query = torch.zeros(2, 8, 16, 64, device="cuda", dtype=torch.bfloat16, requires_grad=True)
        key, value = (torch.zeros(2, keys, 16, 64, device="cuda", dtype=torch.bfloat16) for _ in range(2))
        functional.scaled_dot_product_attention(query, key, value, enable_gqa=keys != 8).sum().backward()

    # 2 products forward and 5 backward of 2*8 heads, 16 x 16 scores, 64 wide
    assert cost_of(step).flops == 7 * 2 * (2 * 8) * 16 * 16 * 64


def test_views_cost_nothing():
    cost = cost_of(lambda: torch.zeros(4, 4, device="cuda").t().view(4, 4).detach())
    assert sum(work.bytes > 0 for work in cost.works) == 1  # the zeros


@pytest.mark.parametrize(
    ("work", "seconds"),
    [
        (Work(10**12, 10, torch.float32, False), 10**12 / 19.5e12),  # bound by arithmetic: 19.5 TFLOP/s
        (Work(10**12, 10, torch.bfloat16, False), 10**12 / 312e12),
        (Work(10, 10**9, torch.float32, False), 10**9 / 1555e9),  # by memory: 1555 GB/s
        (Work(10, 10, torch.float32, False), LAUNCH),
        (Work(0, 10**9, torch.float32, True), 10**9 / PCIE),
        (Work(0, 0, torch.float32, False), 0),
    ],
)
def test_seconds_of_an_op_are_those_of_its_slowest_part(work, seconds):
    assert Cost((work,)).seconds(gpu_catalogue.find("A100-40GB")) == pytest.approx(seconds, rel=1e-3)


def test_bf16_takes_as_long_as_fp32_on_a_gpu_without_bf16_units():
    gpu = gpu_catalogue.find("T4")
    fp16, bf16, fp32 = (
        Cost((Work(10**13, 10, dtype, False),)).seconds(gpu) for dtype in (torch.float16, torch.bfloat16, torch.float32)
    )
    assert fp16 < bf16 == fp32
