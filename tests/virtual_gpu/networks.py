"""A small network and its batch for the virtual GPU, and the bytes of its weights."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional


def allocated() -> int:
    return torch.cuda.memory_allocated()


def network() -> nn.Sequential:
    # 128 * 64 * 4 = 32_768, 128 * 4 = 512, 10 * 128 * 4 = 5_120 and 10 * 4 = 40 bytes, the last one rounded to 512
    return nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))


NETWORK = 32_768 + 512 + 5_120 + 512


def batch() -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(8, 64, device="cuda"), torch.randint(10, (8,), device="cuda")


def backward(model: nn.Module) -> None:
    x, y = batch()
    functional.cross_entropy(model(x), y).backward()
