"""The single operations of the `op` rows, run ten times as their benchmark does: the median of the ten peaks counts.

Nothing resets gradients between the calls, so from the second call on the previous call's gradients are still alive:
an extra tensor of the input's size. The peak of the first call is the smaller one, the median that of the later ones.
"""

import statistics
from collections.abc import Callable

import torch
from torch import nn


class LlamaRmsNorm(nn.Module):
    def __init__(self, width: int, eps: float):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.eps = eps

    def forward(self, x):
        dtype = x.dtype
        x = x.to(torch.float32)
        variance = x.pow(2).mean(-1, keepdim=True)
        x = x * torch.rsqrt(variance + self.eps)
        return self.weight * x.to(dtype)


class LlamaMlp(nn.Module):
    def __init__(self, width: int, inner: int):
        super().__init__()
        self.gate_proj = nn.Linear(width, inner, bias=False)
        self.up_proj = nn.Linear(width, inner, bias=False)
        self.down_proj = nn.Linear(inner, width, bias=False)

    def forward(self, x):
        return self.down_proj(nn.functional.silu(self.gate_proj(x)) * self.up_proj(x))


def _median_peak(call: Callable[[], None]) -> float:
    peaks = []
    for _ in range(10):
        torch.cuda.reset_peak_memory_stats()
        call()
        peaks.append(torch.cuda.max_memory_allocated())
    return statistics.median(peaks)


def _normalised(layer: nn.Module, rows: int, width: int, dtype: torch.dtype) -> float:
    x = torch.randn(rows, width, dtype=dtype, device="cuda")
    gradient = torch.randn_like(x)
    x.requires_grad_(True)

    def call():
        y = layer(x)
        y.backward(gradient, retain_graph=True)

    return _median_peak(call)


def layer_norm(N: int, M: int, eps: float) -> float:
    # The benchmark makes its own kernel's layer beside the one that it measures: weight and bias of the same size.
    other = nn.LayerNorm(N).to("cuda")
    peak = _normalised(nn.LayerNorm(N, eps=eps).to("cuda"), M, N, torch.float32)
    del other
    return peak


def rms_norm(H: int, M: int, eps: float) -> float:
    other = LlamaRmsNorm(H, eps).to("cuda")
    peak = _normalised(LlamaRmsNorm(H, eps).to("cuda"), M, H, torch.bfloat16)
    del other
    return peak


def swiglu(T: int, B: int, hidden_size: int, intermediate_size: int) -> float:
    x = torch.randn(B, T, hidden_size, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    layer = LlamaMlp(hidden_size, intermediate_size).to("cuda").to(torch.bfloat16)

    def call():
        y = layer(x)
        y.backward(torch.randn_like(y), retain_graph=True)

    return _median_peak(call)


def cross_entropy(V: int, B: int, T: int) -> float:
    loss_function = nn.CrossEntropyLoss()
    logits = torch.randn(B * T, V, requires_grad=True, device="cuda")
    target = torch.randint(V, (B * T, 1), device="cuda").squeeze(1)

    def call():
        loss = loss_function(logits, target)
        loss.backward()

    return _median_peak(call)


def kl_div(V: int, B: int, T: int) -> float:
    loss_function = nn.KLDivLoss(reduction="batchmean")
    logits = torch.randn(B * T, V, requires_grad=True, device="cuda").log_softmax(dim=-1)
    target = torch.randn(B * T, V, device="cuda").softmax(dim=-1)

    def call():
        loss = loss_function(logits, target)
        loss.backward(retain_graph=True)

    return _median_peak(call)
