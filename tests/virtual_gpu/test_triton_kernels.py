"""Triton kernels on the virtual GPU: a launch makes no request, and the program goes on."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from memexplore.virtual_gpu.values import known_values
from tests.small import allocated, on_a_t4

# Triton comes with the CUDA builds of torch.
triton = pytest.importorskip("triton")
tl = pytest.importorskip("triton.language")


@triton.jit
def _add_kernel(x, y, out, n, BLOCK: tl.constexpr):
    offsets = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = offsets < n
    tl.store(out + offsets, tl.load(x + offsets, mask=mask) + tl.load(y + offsets, mask=mask), mask=mask)


_tuned = triton.autotune([triton.Config({"BLOCK": 64}), triton.Config({"BLOCK": 128})], key=["n"])(_add_kernel)


@pytest.fixture(autouse=True)
def gpu() -> Iterator[Any]:
    yield from on_a_t4()


@pytest.mark.parametrize(("kernel", "options"), [(_add_kernel, {"BLOCK": 64}), (_tuned, {})], ids=["plain", "tuned"])
def test_a_launch_makes_no_request_to_the_allocator(kernel: Any, options: dict[str, int]) -> None:
    x, y = torch.rand(1000, device="cuda"), torch.rand(1000, device="cuda")
    out = torch.empty_like(x)
    kernel[lambda meta: (triton.cdiv(1000, meta["BLOCK"]),)](x, y, out, 1000, **options)
    # three tensors of 1000 x 4 B, in blocks of a multiple of 512 B: 3 x 4096
    assert allocated() == 3 * 4096
    assert (out * 2).shape == (1000,)


def test_the_values_of_its_tensors_are_unknown_afterwards() -> None:
    out = torch.zeros(4, device="cuda")
    assert known_values.copy_of(out) is not None
    _add_kernel[(1,)](torch.ones(4, device="cuda"), torch.ones(4, device="cuda"), out, 4, BLOCK=64)
    assert known_values.copy_of(out) is None
