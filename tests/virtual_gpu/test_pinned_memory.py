"""Pinned memory: which CPU tensors have it, as on a machine with a GPU, and that it costs nothing there."""

from __future__ import annotations

import collections
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

import memexplore as mx

Pair = collections.namedtuple("Pair", "x y")


@pytest.fixture(autouse=True)
def _gpu() -> Iterator[None]:
    with mx.virtual("T4"):
        yield


def _made_by_a_module() -> torch.Tensor:
    return torch.nn.Linear(1024, 1024).weight.data  # without values


@pytest.mark.parametrize("make", [lambda: torch.arange(6.0), _made_by_a_module], ids=["real", "without values"])
def test_pin_memory_copies_to_pinned_memory(make: Callable[[], torch.Tensor]) -> None:
    x = make()
    pinned = x.pin_memory()
    # at::pin_memory returns the tensor itself if it is pinned; views share the memory, other tensors have their own.
    assert (x.is_pinned(), pinned.is_pinned(), pinned[1:].is_pinned()) == (False, True, True)
    assert pinned.pin_memory() is pinned
    assert pinned.data_ptr() != x.data_ptr()
    assert (pinned + 1).is_pinned() is pinned.clone().is_pinned() is False
    assert (pinned.shape, pinned.stride(), pinned.device.type) == (x.shape, x.stride(), "cpu")
    assert torch.cuda.memory_allocated() == 0


def test_a_pinned_copy_has_the_values_and_the_strides() -> None:
    x = torch.arange(12.0).reshape(3, 4).t()[::2]
    pinned = x.pin_memory()
    assert (pinned.tolist(), pinned.stride()) == (x.tolist(), x.stride())
    pinned.zero_()
    assert x.sum() == 0 + 4 + 8 + 2 + 6 + 10


@pytest.mark.parametrize(
    "make",
    [
        lambda **options: torch.empty(8, **options),
        lambda **options: torch.zeros(2, 3, **options),
        lambda **options: torch.full((3,), 2.0, **options),
        lambda **options: torch.arange(3, **options),
        lambda **options: torch.randn(3, **options),
        lambda **options: torch.empty_like(torch.ones(3), **options),
        lambda **options: torch.ones(3).new_empty(4, **options),
        lambda **options: torch.tensor([1.0, 2.0], **options),
        lambda **options: torch.empty_strided((2, 3), (3, 1), **options),
    ],
)
def test_constructors_take_pin_memory(make: Callable[..., torch.Tensor]) -> None:
    assert (make(pin_memory=True).is_pinned(), make(pin_memory=False).is_pinned()) == (True, False)


def test_memory_of_no_bytes_is_not_pinned() -> None:
    assert not torch.empty(0).pin_memory().is_pinned()


def test_tensors_on_the_gpu_cannot_be_pinned() -> None:
    x = torch.ones(3, device="cuda")
    assert not x.is_pinned()
    with pytest.raises(
        RuntimeError, match=r"cannot pin 'torch\.cuda\.FloatTensor' only dense CPU tensors can be pinned"
    ):
        x.pin_memory()
    for make in (lambda: torch.empty(3, device="cuda", pin_memory=True), lambda: torch.zeros_like(x, pin_memory=True)):
        with pytest.raises(RuntimeError, match="Only dense CPU tensors can be pinned"):
            make()


class _Batch:
    def __init__(self, rows: list[Any]) -> None:
        self.rows = torch.stack([row[0] for row in rows])

    def pin_memory(self) -> _Batch:
        self.rows = self.rows.pin_memory()
        return self


@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize(
    ("collate", "tensors"),
    [
        (None, lambda batch: batch),
        (lambda rows: {"x": torch.stack([row[0] for row in rows])}, lambda batch: batch.values()),
        (lambda rows: Pair(rows[0][0], [rows[0][1]]), lambda batch: (batch.x, *batch.y)),
        (_Batch, lambda batch: (batch.rows,)),
    ],
    ids=["default", "dict", "namedtuple", "own class"],
)
def test_a_loader_pins_its_batches(collate: Any, tensors: Callable[[Any], Any], workers: int) -> None:
    data = TensorDataset(torch.arange(4.0), torch.arange(4))
    for pins in (True, False):
        (batch, *_) = DataLoader(data, 2, num_workers=workers, collate_fn=collate, pin_memory=pins)
        assert [x.is_pinned() for x in tensors(batch)] == [pins] * len(list(tensors(batch)))
    assert torch.cuda.memory_allocated() == 0


def test_the_storage_tells_too() -> None:
    assert torch.ones(3).pin_memory().untyped_storage().is_pinned()
    assert torch.ones(3).untyped_storage().pin_memory().is_pinned()
