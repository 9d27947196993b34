"""A small classifier and its batch on a virtual T4, for tests of ordinary training code."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

import memexplore as mx


def on_a_t4() -> Iterator[Any]:
    """Yield a virtual T4 that is on while the test runs; the body of a fixture."""
    with mx.virtual("T4") as device:
        yield device


def allocated() -> int:
    return torch.cuda.memory_allocated()


def network() -> nn.Sequential:
    return nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))


def batch() -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(8, 64, device="cuda"), torch.randint(10, (8,), device="cuda")
