"""Long watched runs: what watching keeps does not grow with the steps, and no change of settings ends a run."""

from __future__ import annotations

import contextlib
import gc
import random

import pytest
import torch
from torch import nn

import memexplore as mx
from memexplore.live.recorded_steps import MOST_TAPES
from memexplore.live.thinning import CAPACITY, RECENT
from memexplore.run.knobs.knobs import Knobs
from tests.live.knob_loops import Tight, judged, states, tight_gpu

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


SETTINGS = [
    Knobs(),
    Knobs(checkpoint="none"),
    Knobs(checkpoint="every 2"),
    Knobs(offload="saved tensors on the CPU"),
    Knobs(checkpoint="none", inplace="on"),
    Knobs(checkpoint="sqrt", offload="saved tensors on the CPU"),
]


@pytest.mark.parametrize("has_step", [True, False], ids=["step=", "no step="])
def test_twenty_changes_of_settings_do_not_end_a_run_of_a_thousand_steps_on_a_full_gpu(has_step: bool) -> None:
    draw = random.Random(0)
    requested = Knobs()
    with tight_gpu():
        loop = Tight()
        with mx.watch(loop.model, loop.optimizer, step=loop.written() if has_step else None) as live:
            for _ in range(20):
                for _ in range(50):
                    loop.step()
                requested = draw.choice([knobs for knobs in SETTINGS if knobs != requested])
                # Without a step, a setting is refused at once.
                with contextlib.suppress(ValueError):
                    live.knobs = requested
                if states(live):
                    judged(live, loop.step)
    assert live.steps()["step"].iloc[-1] >= 1000
    assert len(states(live)) >= 10
    assert set(states(live)) <= {"applied", "refused"}
    assert "refused" in states(live)
