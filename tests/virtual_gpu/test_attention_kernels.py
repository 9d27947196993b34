"""Attention kernels: the choice by card, release, dtype and shape, and their memory requests."""

import pytest
import torch
import torch.nn.functional as F

from memexplore.virtual_gpu.kernels import attention
from memexplore.virtual_gpu.kernels.cuda_build import Build
from tests.virtual_gpu.kernel_requests import allocations, requests, use


def call(dtype=torch.float16, *, width=64, length=128, keys=None, mask=None, dropout=0.0, causal=False, heads=4):
    query = torch.empty(2, 4, length, width, dtype=dtype, device="meta")
    key, value = (torch.empty(2, heads, keys or length, width, dtype=dtype, device="meta") for _ in range(2))
    return attention.Call(query, key, value, mask, dropout, causal, heads != 4)


@pytest.mark.parametrize(
    ("capability", "release", "arguments", "kernel"),
    [
        ((8, 0), (2, 13), {}, "FLASH"),
        ((8, 0), (2, 13), {"dtype": torch.float32}, "EFFICIENT"),
        ((8, 0), (2, 13), {"dtype": torch.float64}, "MATH"),
        ((8, 0), (2, 13), {"width": 320}, "EFFICIENT"),
        ((8, 0), (2, 13), {"width": 60, "dtype": torch.float32}, "EFFICIENT"),
        ((8, 0), (2, 13), {"width": 61, "dtype": torch.float32}, "MATH"),
        ((8, 0), (2, 13), {"mask": torch.empty(128, 128, device="meta")}, "EFFICIENT"),
        ((8, 0), (2, 13), {"causal": True, "keys": 256}, "EFFICIENT"),
        ((8, 0), (2, 13), {"heads": 2}, "FLASH"),
        ((8, 0), (2, 13), {"heads": 2, "dtype": torch.float32}, "MATH"),
        ((7, 5), (2, 13), {}, "EFFICIENT"),
        ((7, 5), (2, 13), {"dtype": torch.bfloat16}, "MATH"),
        ((9, 0), (2, 13), {}, "CUDNN"),
        ((9, 0), (2, 13), {"dropout": 0.1}, "CUDNN"),
        ((9, 0), (2, 9), {"dropout": 0.1}, "FLASH"),
        ((9, 0), (2, 7), {}, "FLASH"),
        ((9, 0), (2, 10), {}, "FLASH"),
        ((12, 0), (2, 13), {}, "FLASH"),
    ],
)
def test_attention_kernel_is_chosen_by_card_release_dtype_and_shape(capability, release, arguments, kernel):
    with use(Build(release, capability, 108)):
        assert attention.chosen_kernel(call(**arguments)).name == kernel


def test_attention_kernel_is_one_of_the_enabled_backends():
    with use(Build((2, 13), (8, 0), 108)), torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        assert attention.chosen_kernel(call()) is attention.Kernel.MATH


def test_no_supported_attention_kernel_raises_the_error_of_torch():
    with (
        use(Build((2, 13), (7, 5), 40)),
        torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.FLASH_ATTENTION),
        pytest.raises(RuntimeError, match="No available kernel"),
    ):
        attention.chosen_kernel(call())


def test_flash_attention_requests_result_sums_and_random_state_on_the_device():
    def make():
        query = torch.ones(2, 64, 128, 64, device="cuda", dtype=torch.float16)
        return lambda: F.scaled_dot_product_attention(query, query, query)

    name = "_scaled_dot_product_flash_attention"
    # result 2·64·128·64·2, log-sum-exp 2·64·128·4, two and one 64-bit numbers
    assert allocations(make) == [(name, 2097152), (name, 65536), (name, 16), (name, 8)]


def test_flash_attention_pads_heads_to_a_multiple_of_eight():
    def make():
        query = torch.ones(2, 64, 128, 60, device="cuda", dtype=torch.float16)
        return lambda: F.scaled_dot_product_attention(query, query, query)

    # three paddings of 2·64·128·64·2 bytes before the kernel
    assert allocations(make)[:3] == [("constant_pad_nd", 2097152)] * 3


def test_efficient_attention_backward_makes_the_recorded_requests():
    # A recording with torch 2.1, float32, 32 heads of 64, 1000 rows: products, sums, their copy, workspace.
    def make():
        query, key, value = (torch.ones(1, 32, 1000, 64, device="cuda", requires_grad=True) for _ in range(3))
        out = F.scaled_dot_product_attention(query, key, value)
        gradient = torch.ones(1, 1000, 32, 64, device="cuda").transpose(1, 2)
        return lambda: torch.autograd.grad(out, (query, key, value), gradient)

    events = requests(make, gpu="T4", release="2.1")
    sizes = [entry if isinstance(entry, int) else entry[1] for entry in events]
    # gradients 1000·32·64·4; product; sums 32·1000·4 twice; 16 blocks of 64·64+4 floats for each head
    start = [8192000] * 4 + [128000, 128000, -128000, -8192000, 8396800, -128000, -8396800]
    assert sizes[: len(start)] == start
