"""FLOPs and seconds of a step, by hand."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional

import memexplore as mx
from memexplore.hardware import catalogue
from memexplore.run.programs.cost import Cost, measuring
from memexplore.virtual_gpu.device import active
from memexplore.virtual_gpu.dispatch.work import LAUNCH, PCIE, Rate, Work


def cost_of(function) -> Cost:
    with mx.virtual("A100"):
        device = active()
        assert device is not None
        with measuring(device) as meter:
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


def test_recurrent_layers_and_their_backward():
    def step() -> None:
        layer = nn.LSTM(8, 16, num_layers=2, bias=False).cuda()
        layer(torch.zeros(5, 3, 8, device="cuda"))[0].sum().backward()

    # 4 gates of 16 numbers from 8 and 16 below the first layer, from 16 and 16 below the second; 5 steps of 3 sequences
    assert cost_of(step).flops == 3 * 2 * (5 * 3) * 4 * 16 * (8 + 16 + 16 + 16)


def test_products_use_tf32_where_the_program_allows_it():
    def step() -> None:
        a = torch.ones(4, 4, device="cuda")
        a @ a
        torch.set_float32_matmul_precision("high")
        a @ a

    before = torch.get_float32_matmul_precision()
    try:
        assert [work.rate for work in cost_of(step).works if work.flops] == [Rate.FP32, Rate.TF32]
    finally:
        torch.set_float32_matmul_precision(before)


def test_convolutions_use_tf32_by_default():
    cost = cost_of(lambda: nn.Conv2d(3, 4, 3).cuda()(torch.zeros(2, 3, 8, 8, device="cuda")))
    assert [work.rate for work in cost.works if work.flops] == [Rate.TF32]


def test_a_copy_from_the_cpu_sends_each_byte_once():
    assert cost_of(lambda: torch.zeros(1000).cuda()).works == (Work(0, 4000, Rate.LINK),)


def test_a_number_on_the_cpu_is_no_copy():
    def step() -> None:
        torch.zeros(1000, device="cuda") * torch.tensor(2.0)

    # zeros, then 4 000 bytes read and 4 000 written
    assert cost_of(step).works == (Work(0, 4000, Rate.FP32), Work(0, 8000, Rate.FP32))


def test_attention_that_returns_its_seed_on_the_cpu_is_no_copy():
    def step() -> None:
        query = torch.zeros(2, 8, 64, 64, device="cuda", dtype=torch.bfloat16)
        functional.scaled_dot_product_attention(query, query, query)

    with mx.virtual("A100", release="2.6"):
        device = active()
        assert device is not None
        with measuring(device) as meter:
            step()
    assert [work.rate for work in meter.total().works if work.flops] == [Rate.BF16]


def test_views_cost_nothing():
    cost = cost_of(lambda: torch.zeros(4, 4, device="cuda").t().view(4, 4).detach())
    assert sum(work.bytes > 0 for work in cost.works) == 1  # the zeros


@pytest.mark.parametrize(
    ("work", "seconds"),
    [
        (Work(10**12, 10, Rate.FP32), 10**12 / 19.5e12),  # bound by arithmetic: 19.5 TFLOP/s
        (Work(10**12, 10, Rate.BF16), 10**12 / 312e12),
        (Work(10**12, 10, Rate.TF32), 10**12 / 156e12),
        (Work(10, 10**9, Rate.FP32), 10**9 / 1555e9),  # by memory: 1555 GB/s
        (Work(10, 10, Rate.FP32), LAUNCH),
        (Work(0, 10**9, Rate.LINK), 10**9 / PCIE),
        (Work(0, 0, Rate.FP32), 0),
    ],
)
def test_seconds_of_an_op_are_those_of_its_slowest_part(work, seconds):
    assert Cost((work,)).seconds(catalogue.find("A100-40GB")) == pytest.approx(seconds, rel=1e-3)


def test_bf16_and_tf32_take_as_long_as_fp32_on_a_gpu_without_units_for_them():
    gpu = catalogue.find("T4")
    fp16, bf16, tf32, fp32 = (
        Cost((Work(10**13, 10, rate),)).seconds(gpu) for rate in (Rate.FP16, Rate.BF16, Rate.TF32, Rate.FP32)
    )
    assert fp16 < bf16 == tf32 == fp32
