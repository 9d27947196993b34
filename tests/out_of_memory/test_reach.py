from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest
import torch

from memexplore.out_of_memory.reach import is_node
from tests.out_of_memory import cells


class _AnyAttribute(type):
    def __getattr__(cls, name: str) -> Any:
        return None


class _Settings(metaclass=_AnyAttribute):
    pass


class _Double(torch.autograd.Function):
    @staticmethod
    def forward(context: Any, x: torch.Tensor) -> torch.Tensor:
        return x * 2

    @staticmethod
    def backward(context: Any, gradient: torch.Tensor) -> torch.Tensor:
        return gradient * 2


@pytest.mark.parametrize("function", [torch.exp, _Double.apply], ids=["built in", "in Python"])
def test_what_computed_a_tensor_is_a_node(function: Any) -> None:
    result = function(torch.ones(2, requires_grad=True))
    assert is_node(result.grad_fn)
    assert is_node(result.grad_fn.next_functions[0][0])


def test_an_object_whose_metaclass_has_any_attribute_is_no_node() -> None:
    assert not is_node(_Settings())


def test_no_class_of_the_user_is_kept_alive() -> None:
    kept = []
    source = """
class Loader:
    def __init__(self):
        self.size = 3

loader, data = Loader(), torch.zeros(20 << 20, dtype=torch.uint8, device="cuda")
keep(data)
torch.zeros(400 << 20, dtype=torch.uint8, device="cuda")
"""
    assert cells.run(source, "200MiB", {"keep": lambda value: kept.append(weakref.ref(value))})[1] is not None
    gc.collect()
    assert kept[0]() is None


@pytest.mark.parametrize("kept", ["x.requires_grad_()", "x = (x.requires_grad_() * 1); x.retain_grad()"])
def test_gradients_that_a_tensor_keeps_are_reached(kept: str) -> None:
    source = f"""
kept = []
for _ in range(20):
    x = torch.ones(1 << 20, device="cuda")
    {kept}
    x.sum().backward()
    kept.append(x)
"""
    _, evidence = cells.run(source, "64MiB")
    assert evidence is not None
    sizes = {holder.name: holder.size for holder in evidence.holders}
    # 4 MiB of each tensor and as much of its gradient; the leaves behind them take as much, which no list has.
    assert sizes["kept"] >= 24 << 20


@pytest.mark.parametrize(
    ("where", "holder"),
    [
        ("samples[900].fields['image'] = big()", "samples"),
        ("samples[900].later = lambda image=big(): image", "samples"),
        ("Sample.shared = big()", "Sample.shared"),
    ],
    ids=["deep inside", "default of a function", "attribute of the class"],
)
def test_a_tensor_among_many_objects_of_data_is_found(where: str, holder: str) -> None:
    source = f"""
class Sample:
    def __init__(self, number):
        self.number, self.fields = number, {{"names": [str(number), [number]]}}

def big():
    return torch.zeros(20 << 20, dtype=torch.uint8, device="cuda")

samples = [Sample(number) for number in range(1000)]
{where}
torch.zeros(400 << 20, dtype=torch.uint8, device="cuda")
"""
    found = cells.post_mortem(source, "200MiB")
    assert found.complete
    assert [(each.name, each.size) for each in found.holders if each.size] == [(holder, 20 << 20)]
