"""Loops whose knobs tests switch, and plain loops with the same knobs from the start."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import memexplore as mx
from memexplore.live.live import Live
from memexplore.run.knobs.applying.apply import apply

BATCH = {"cpu": 64, "cuda": 4096}
"""Samples by device: on the virtual GPU, activations are most of the memory."""
WIDTH = 32
SECONDS = 200.0
"""Time that a prediction may take on a busy machine."""
CHECKPOINT = mx.Knobs(checkpoint="every 1")


def states(live: Any) -> list[str]:
    return live.changes()["state"].tolist()


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, value: torch.Tensor) -> torch.Tensor:
        return self.second(torch.relu(self.first(value)))


class Trained:
    """A model of four blocks with dropout, its optimizer and its losses."""

    def __init__(self, device: str = "cpu", make: Callable[..., torch.optim.Optimizer] = torch.optim.AdamW) -> None:
        torch.manual_seed(0)
        self.device = device
        self.model = nn.Sequential(*(Block() for _ in range(4)), nn.Dropout(0.1)).to(device)
        self.optimizer = make(self.model.parameters(), lr=0.01)
        self.losses: list[torch.Tensor] = []

    def batch(self) -> torch.Tensor:
        return torch.randn(BATCH[self.device], WIDTH, device=self.device)

    def written(self) -> mx.Step:
        """The step as a value; its batch is on the CPU, and takes no memory of the GPU."""
        batch = torch.zeros(BATCH[self.device], WIDTH)
        return mx.Step(self.model, batch, loss=lambda output: output.square().mean(), optimizer=self.optimizer)

    def step(self) -> None:
        loss = self.model(self.batch()).square().mean()
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        # On the CPU, so that they take no memory of the GPU.
        self.losses.append(loss.detach().cpu())

    def step_of(self, live: Live) -> None:
        """A step with the functions that a watched run hands its loop."""
        losses = []
        for part in live.micro_batches(self.batch()):
            with live.autocast():
                losses.append(self.model(part).float().square().mean())
            live.backward(losses[-1])
            losses[-1] = losses[-1].detach()
        live.step(self.optimizer)
        self.optimizer.zero_grad()
        self.losses.append(sum(losses))  # type: ignore[arg-type]


def tight_gpu() -> Any:
    """Return the virtual GPU of `Tight`."""
    return mx.virtual("120MiB", release="2.13")


class Checkpointed(nn.Module):
    """Blocks whose activations are recomputed."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(256, 256), nn.GELU()) for _ in range(8))

    def forward(self, value: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            value = checkpoint(block, value, use_reentrant=False)
        return value


class Tight:
    """A loop on a GPU that has no room for activations that are kept."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.model = Checkpointed().cuda()
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)
        self.batch = torch.randn(6000, 256)

    def written(self) -> mx.Step:
        return mx.Step(self.model, self.batch, loss=lambda output: output.square().mean(), optimizer=self.optimizer)

    def step(self) -> None:
        self.model(self.batch.cuda()).square().mean().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def step_of(self, live: Live) -> None:
        """A step with the functions that a watched run hands its loop."""
        for part in live.micro_batches(self.batch.cuda()):
            with live.autocast():
                loss = self.model(part).float().square().mean()
            live.backward(loss)
        live.step(self.optimizer)
        self.optimizer.zero_grad()


def switched(steps: int, knobs: Mapping[int, mx.Knobs], device: str = "cpu", **options: Any) -> tuple[Trained, Live]:
    """Run a watched loop; before the step of a number from 1 on, request knobs, which the step after it has."""
    trained = Trained(device)
    with mx.watch(trained.model, trained.optimizer, **options) as live:
        for number in range(1, steps + 1):
            if number in knobs:
                live.knobs = knobs[number]
            trained.step()
    return trained, live


def from_the_start(steps: int, knobs: mx.Knobs, device: str = "cpu", **options: Any) -> tuple[Trained, Live]:
    """Run a watched loop inside of `apply`."""
    trained = Trained(device)
    with apply(knobs, trained.model), mx.watch(trained.model, trained.optimizer, **options) as live:
        for _ in range(steps):
            trained.step()
    return trained, live


def judged(live: Any, step: Any) -> str:
    """Run steps until the prediction of the last request is there, and one more; return the state of the request."""
    ends = time.monotonic() + SECONDS
    while states(live)[-1] == "predicting" and time.monotonic() < ends:
        step()
        time.sleep(0.05)
    step()
    return states(live)[-1]
