"""Ops for which torch has no fake kernel: outputs as on the CPU, no request but those, and notes on solvers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from memexplore.recorder.recording import record
from memexplore.run.machine import virtual
from tests.virtual_gpu.kernel_requests import allocations


def _trains(loss: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[torch.device], Any]:
    def run(device: torch.device) -> Any:
        x = torch.randn(4, 6, device=device, requires_grad=True)
        result = loss(x)
        (gradient,) = torch.autograd.grad(result.sum(), x)
        return result.shape, result.stride(), result.dtype, gradient.stride()

    return run


def _there_and_back(signal: torch.Tensor, window: torch.Tensor) -> torch.Tensor:
    return torch.istft(torch.stft(signal, 8, window=window, return_complex=True), 8, window=window)


CASES = [
    _trains(lambda x: F.multi_margin_loss(x, torch.zeros(4, dtype=torch.long, device=x.device))),
    _trains(lambda x: F.multilabel_margin_loss(x, torch.zeros(4, 6, dtype=torch.long, device=x.device))),
    _trains(lambda x: torch.fake_quantize_per_tensor_affine(x, 0.1, 0, -128, 127)),
    _trains(
        lambda x: torch.istft(
            torch.stft(x.view(24), 8, window=x.new_ones(8), return_complex=True), 8, window=x.new_ones(8)
        )
    ),
    _trains(lambda x: torch.linalg.lstsq(x[:, :4], x[:, 4:])[0]),
    _trains(lambda x: torch.distributions.Dirichlet(x.exp()).rsample()),
    _trains(lambda x: torch.distributions.Beta(x.exp(), x.exp()).rsample()),
    lambda device: [value.stride() for value in torch.geqrf(torch.randn(5, 3, device=device))],
    lambda device: F.cosine_similarity(torch.randn((), device=device), torch.randn((), device=device), dim=0).shape,
]


@pytest.mark.parametrize("case", CASES)
def test_outputs_are_those_of_the_cpu(case: Callable[[torch.device], Any]) -> None:
    with virtual("T4"):
        on_gpu = case(torch.device("cuda"))
    assert on_gpu == case(torch.device("cpu"))


def test_fake_quantization_allocates_the_values_and_a_mask() -> None:
    def run() -> Callable[[], Any]:
        x = torch.randn(1000, device="cuda")
        return lambda: torch.fake_quantize_per_tensor_affine(x, 0.1, 0, -128, 127)

    # 1000 values of 4 bytes, 1000 flags of 1 byte.
    sizes = [size for _, size in allocations(run)]
    assert sizes == [4000, 1000]


def test_a_solver_is_noted() -> None:
    with virtual("T4"), record() as recording:
        torch.linalg.svd(torch.randn(4, 4, device="cuda"))
    assert any("cuSOLVER" in note for note in recording.tape.meta.notes)


@pytest.mark.skipif(torch.__version__.startswith("2.11"), reason="fused Adagrad is for the CPU only in torch 2.11")
def test_fused_adagrad_steps() -> None:
    with virtual("T4"):
        layer = nn.Linear(8, 8).cuda()
        layer(torch.randn(2, 8, device="cuda")).sum().backward()
        optimizer = torch.optim.Adagrad(layer.parameters(), fused=True)
        before = torch.cuda.memory_allocated()
        optimizer.step()
        assert torch.cuda.memory_allocated() == before


def test_zeros_that_died_do_not_make_a_later_op_work_in_place() -> None:
    """The storage of a tensor may have the C++ address of zeros that a formula made before."""
    with virtual("T4"):
        for _ in range(20):
            x = torch.randn(3, 4, device="cuda", requires_grad=True)
            torch.cov(x, fweights=torch.tensor([1, 2, 1, 1], device="cuda")).sum().backward()
            torch.var(x[:, torch.tensor([0, 1], device="cuda")]).backward()
