"""A run of 100 000 steps: what watching keeps does not grow with the steps."""

from __future__ import annotations

import gc

import torch
from torch import nn

import memexplore as mx
from memexplore.live.recorded_steps import MOST_TAPES
from memexplore.live.thinning import CAPACITY, RECENT

STEPS = 100_000


def test_memory_is_flat_over_a_hundred_thousand_steps():
    model, batch = nn.Linear(1, 1), torch.ones(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    objects = {}
    with mx.watch(model, optimizer, first=1, every=1000) as live:
        for step in range(1, STEPS + 1):
            model(batch).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            if step in (STEPS // 2, STEPS):
                gc.collect()
                objects[step] = len(gc.get_objects())
    assert objects[STEPS] <= 1.02 * objects[STEPS // 2]
    table = live.steps()
    assert len(table) <= CAPACITY + RECENT
    assert table["step"].iloc[-RECENT:].tolist() == list(range(STEPS - RECENT + 1, STEPS + 1))
    assert len(live.recorded) <= MOST_TAPES
    assert live.layers().shape[1] <= 512
