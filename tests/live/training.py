"""Small training loops that tests watch, on the CPU and on a virtual GPU."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import nn

import memexplore as mx


def on(device: str) -> AbstractContextManager[Any]:
    """A virtual T4 for ``cuda``, nothing for ``cpu``."""
    return mx.virtual("T4") if device == "cuda" else nullcontext()


def network(device: str = "cpu") -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10)).to(device)


class Loop:
    """A model, its optimizer and steps of training."""

    def __init__(self, device: str = "cpu", make: Callable[..., torch.optim.Optimizer] = torch.optim.AdamW) -> None:
        self.device = device
        self.model = network(device)
        self.optimizer = make(self.model.parameters(), lr=0.01)

    def loss(self, batch: int = 8) -> torch.Tensor:
        return self.model(torch.randn(batch, 64, device=self.device)).square().mean()

    def step(self, batch: int = 8) -> torch.Tensor:
        loss = self.loss(batch)
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss.detach()

    def steps(self, *batches: int) -> Iterator[torch.Tensor]:
        for batch in batches:
            yield self.step(batch)


def watched(device: str, *batches: int, **options: Any) -> mx.live.live.Live:  # type: ignore[name-defined]
    """Return the `Live` of a loop with these batches."""
    with on(device):
        loop = Loop(device)
        with mx.watch(loop.model, loop.optimizer, **options) as live:
            for batch in batches:
                loop.step(batch)
    return live
