"""Training steps that tests of the recorder record, and the rows of their tapes."""

from __future__ import annotations

import numpy as np
import torch
from torch import nn
from torch.nn import functional

import memexplore as mx
from memexplore.tape import Action, Category, Tape


def block_sizes(tape: Tape, category: Category) -> list[int]:
    """Return the sizes of the blocks of a category, in the order of their allocation."""
    born = np.isin(tape.action, (Action.ALLOC, Action.PREEXISTING))
    return tape.size[born & (tape.category == category)].tolist()


def rows_of(tape: Tape, **wanted: object) -> list[int]:
    """Return the rows whose columns have the wanted values."""
    frame = tape.to_pandas()
    for name, value in wanted.items():
        frame = frame[frame[name] == value]
    return frame.index.tolist()


def train(device: str, steps: int = 2) -> Tape:
    """Record a 100 -> 200 -> 10 network trained with Adam, from its construction on."""

    def run() -> None:
        model = nn.Sequential(nn.Linear(100, 200), nn.ReLU(), nn.Linear(200, 10)).to(device)
        optimizer = torch.optim.Adam(model.parameters())
        x, y = torch.randn(64, 100, device=device), torch.randint(10, (64,), device=device)
        for _ in range(steps):
            functional.cross_entropy(model(x), y).backward()
            optimizer.step()
            optimizer.zero_grad()

    if device == "cuda":
        return mx.simulate(run, gpu="T4")
    with mx.record() as recording:
        run()
    return recording.tape
