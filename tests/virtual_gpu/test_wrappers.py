"""Wrapper subclasses: nested tensors, and quantized optimizer states as libraries such as torchao make them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from tests.small import allocated, on_a_t4

WORKSPACE = 8_519_680


@pytest.fixture(autouse=True)
def gpu() -> Iterator[Any]:
    yield from on_a_t4()


class Quantized(torch.Tensor):
    """Codes of 8 bits and a scale for each 256 of them, as torchao keeps the states of its optimizers."""

    codes: torch.Tensor
    scale: torch.Tensor

    @staticmethod
    def __new__(cls, codes: torch.Tensor, scale: torch.Tensor) -> Any:
        return torch.Tensor._make_wrapper_subclass(cls, codes.shape, device=codes.device, dtype=torch.float32)

    def __init__(self, codes: torch.Tensor, scale: torch.Tensor) -> None:
        self.codes, self.scale = codes, scale

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["codes", "scale"], None

    @classmethod
    def zeros(cls, like: torch.Tensor) -> Any:
        codes = torch.zeros(like.shape, dtype=torch.uint8, device=like.device)
        return cls(codes, torch.zeros(like.numel() // 256, device=like.device))

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        target, source = args[:2]
        assert func is torch.ops.aten.copy_.default
        target.codes.copy_((source / target.scale.mean()).to(torch.uint8))
        return target


def test_a_wrapper_says_cuda_and_takes_the_memory_of_the_tensors_inside() -> None:
    weight = torch.zeros(1024, 1024, device="cuda")
    before = allocated()
    state = Quantized.zeros(weight)
    assert (str(state.device), state.is_cuda, state.is_meta) == ("cuda:0", True, False)
    assert allocated() - before == 1024 * 1024 + 1024 * 1024 // 256 * 4
    state.copy_(weight)
    assert allocated() - before == 1024 * 1024 + 1024 * 1024 // 256 * 4


def test_wrappers_on_the_cpu_stay_there() -> None:
    state = Quantized.zeros(torch.zeros(512))
    assert (state.device.type, allocated()) == ("cpu", 0)


@pytest.mark.parametrize("name", ["AdamW8bit", "AdamW4bit", "AdamWFp8"])
def test_low_bit_optimizers_of_torchao_have_their_true_state(name: str) -> None:
    optimizers = pytest.importorskip("torchao.optim")
    layer = nn.Linear(1024, 1024, bias=False).cuda()
    optimizer = getattr(optimizers, name)(layer.parameters())
    for _ in range(2):
        layer(torch.randn(4, 1024, device="cuda")).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    weights = 1024 * 1024
    # Two states: codes, scales of blocks of 256 or 128 codes, and tables of 256 or 16 numbers.
    states = {
        "AdamW8bit": 2 * (weights + weights // 256 * 4 + 1024),
        "AdamW4bit": 2 * (weights // 2 + weights // 128 * 4 + 512),
        "AdamWFp8": 2 * (weights + weights // 256 * 4),
    }
    assert allocated() - 2 * WORKSPACE - weights * 4 == states[name]


def nested(**options: Any) -> torch.Tensor:
    rows = [torch.randn(3, 64, device="cuda"), torch.randn(5, 64, device="cuda")]
    return torch.nested.nested_tensor(rows, layout=torch.jagged, **options)


def test_a_jagged_nested_tensor_trains() -> None:
    sequences, layer = nested(requires_grad=True), nn.Linear(64, 16).cuda()
    output = layer(sequences)
    output.values().sum().backward()
    assert (output.is_nested, output.values().shape, layer.weight.grad.shape) == (True, (8, 16), (16, 64))
    assert sequences.is_cuda


def test_a_jagged_nested_tensor_holds_its_rows_and_offsets() -> None:
    rows = torch.randn(8, 64, device="cuda")
    offsets = torch.tensor([0, 3, 8], device="cuda")
    before = allocated()
    sequences = torch.nested.nested_tensor_from_jagged(rows, offsets)
    assert allocated() == before
    assert F.relu(sequences).values().shape == (8, 64)


def test_jagged_nested_tensors_of_the_cpu_move_with_their_shape() -> None:
    rows = [torch.ones(3, 64), torch.ones(5, 64)]
    on_cpu = torch.nested.nested_tensor(rows, layout=torch.jagged)
    before = allocated()
    first = on_cpu.cuda()
    assert allocated() - before == 2048 + 512  # rows of 8 * 64 * 4 bytes, and offsets
    total = first + (on_cpu * 2).to("cuda")
    assert total.shape == on_cpu.shape
    assert total.cpu().values().sum().item() == 3 * 8 * 64


@pytest.mark.filterwarnings("ignore")
def test_masked_tensors_compute() -> None:
    values = torch.arange(4.0, device="cuda")
    masked = torch.masked.masked_tensor(values, values % 2 == 0)
    assert (masked + masked).sum().get_data().item() == 4  # 2 * (0 + 2)
    assert masked.cpu().to_tensor(-1.0).tolist() == [0, -1, 2, -1]
    assert torch.masked.masked_tensor(values.cpu(), values.cpu() > 2).cuda().sum().item() == 3


class Logged(torch.Tensor):
    """A wrapper without `__tensor_flatten__`, as tutorials write one."""

    inner: torch.Tensor

    @staticmethod
    def __new__(cls, inner: torch.Tensor) -> Any:
        result = torch.Tensor._make_wrapper_subclass(cls, inner.size(), dtype=inner.dtype, device=inner.device)
        result.inner = inner
        return result

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        plain = [value.inner if isinstance(value, Logged) else value for value in args]
        return cls(func(*plain, **(kwargs or {})))


def test_a_wrapper_without_parts_runs_its_own_code() -> None:
    result: Any = Logged(torch.arange(3.0, device="cuda")) * 2
    assert (type(result), result.inner.tolist()) == (Logged, [0, 2, 4])
