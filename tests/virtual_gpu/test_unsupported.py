"""What a virtual GPU cannot simulate ends in one sentence that says what to use instead."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from memexplore.virtual_gpu import device
from memexplore.virtual_gpu.dispatch import unsupported
from memexplore.virtual_gpu.values.value_reads import NotSimulated
from tests.small import on_a_t4


@pytest.fixture(autouse=True)
def gpu() -> Iterator[Any]:
    yield from on_a_t4()


_CSR = "layout CSR, CSC, BSR or BSC cannot be simulated .*: use layout torch.sparse_coo"
_NESTED = "nested tensor of layout torch.strided cannot be simulated .*: make it with layout=torch.jagged"
_QUANTIZED = "quantized dtype cannot be simulated .*: use tensors of int8 with a scale"


def _parts() -> list[torch.Tensor]:
    return [torch.ones(2, 3), torch.ones(4, 3)]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("message", "function"),
    [
        (_CSR, lambda: torch.eye(4, device="cuda").to_sparse_csr()),
        (_CSR, lambda: torch.eye(4, device="cuda").to_sparse_bsr(2)),
        (_CSR, lambda: torch.sparse_csr_tensor([0, 1, 2], [0, 1], [1.0, 2.0], device="cuda")),
        (_NESTED, lambda: torch.nested.nested_tensor(_parts(), device="cuda")),
        (_NESTED, lambda: torch.nested.nested_tensor(_parts()).cuda()),
        (_NESTED, lambda: torch.nested.as_nested_tensor([part.cuda() for part in _parts()])),
        (_QUANTIZED, lambda: torch.quantize_per_tensor(torch.ones(4, device="cuda"), 0.1, 0, torch.qint8)),
        (_QUANTIZED, lambda: torch.quantize_per_tensor(torch.ones(4), 0.1, 0, torch.qint8).cuda()),
        (_QUANTIZED, lambda: torch.empty(4, dtype=torch.quint8, device="cuda")),
    ],
)
def test_an_unsupported_kind_of_tensor_is_named_with_the_one_to_use(message: str, function: Callable[[], Any]) -> None:
    with pytest.raises(NotSimulated, match=rf"test_unsupported.py:\d+: .*{message}"):
        function()


def test_fake_quantization_runs() -> None:
    result = torch.fake_quantize_per_tensor_affine(torch.tensor([0.04, 0.16], device="cuda"), 0.1, 0, 0, 255)
    assert result.cpu().allclose(torch.tensor([0.0, 0.2]))  # steps of 0.1


def test_the_advice_of_torch_to_authors_of_ops_is_left_out() -> None:
    error = NotImplementedError("no kernel was registered. You may have run into this message while\nusing PT2")
    assert str(unsupported.not_simulated("aten.op.default", error)).endswith(
        "aten.op.default cannot be simulated on a virtual GPU (NotImplementedError: no kernel was registered); profile "
        "it on a real GPU, or replace it by an op whose output shape does not depend on values"
    )


def test_a_tensor_of_the_real_gpu_is_refused_with_what_to_do(monkeypatch):
    # The tensor stands for one of a real GPU, as after `x.cuda()` in an earlier cell.
    x = torch.zeros(2, 3)
    monkeypatch.setattr(unsupported, "is_on_real_gpu", lambda tensor: tensor is x)
    monkeypatch.setattr(device.active().mode, "is_beside_real_gpu", True)
    assert x.detach().numpy().sum() == 0
    with pytest.raises(RuntimeError, match=r"shape \(2, 3\) on the real GPU.*--dry-run"):
        x + 1
    assert torch.zeros(2, device="cuda").add(1).is_cuda
