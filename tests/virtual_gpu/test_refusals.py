"""Functions of torch that say in one sentence that they do not run on a virtual GPU, and run on the CPU as ever."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.utils.dlpack

from memexplore.torch_internals.dispatch import FakeTensorMode
from memexplore.virtual_gpu.values.value_reads import NotSimulated
from tests.small import on_a_t4


def _in_a_fake_mode() -> None:
    with FakeTensorMode():
        torch.ones(3, device="cuda")


@pytest.fixture(autouse=True)
def gpu() -> Iterator[Any]:
    yield from on_a_t4()


@pytest.mark.parametrize(
    ("message", "function"),
    [
        ("DLPack: hand over tensor.cpu", torch.from_dlpack),
        ("DLPack: hand over tensor.cpu", torch.utils.dlpack.to_dlpack),
        ("use torch.func.jvp", lambda x: torch.func.linearize(torch.sin, x)),
        ("torch.export traces the model", lambda x: torch.export.export(torch.nn.ReLU(), (x,))),
        ("whose tensors are fake already", lambda x: _in_a_fake_mode()),
        ("a storage without a tensor", lambda x: x.cpu().untyped_storage().cuda()),
    ],
)
def test_a_function_says_what_to_use_instead(message: str, function: Callable[[torch.Tensor], Any]) -> None:
    name = getattr(function, "__name__", "")
    # The names are replaced while the GPU is on.
    function = torch.utils.dlpack.to_dlpack if name == "_to_dlpack" else function
    with pytest.raises(NotSimulated, match=message):
        function(torch.ones(3, device="cuda"))


def test_tensors_of_the_cpu_are_handed_over() -> None:
    source = torch.arange(3)
    assert torch.from_dlpack(source).tolist() == [0, 1, 2]
    assert len(list(torch.export.export(torch.nn.ReLU(), (source,)).graph.nodes)) == 3  # input, op and output
    assert source.untyped_storage().clone().nbytes() == 24  # 3 * 8
    assert torch.nested.nested_tensor([source, source]).size(0) == 2
