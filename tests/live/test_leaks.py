"""Leaks: memory that keeps rising is found, with layer, line and holder; what only looks like a leak is not."""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Iterable
from pathlib import Path

import numpy as np
import pytest
import torch

import memexplore as mx
from memexplore.live.holders import holders
from memexplore.live.leaks import Leaks
from memexplore.ranks.rows import StepRow
from tests.live.training import Loop, on

BOTH = pytest.mark.parametrize("device", ["cpu", "cuda"])
STEPS = 40
MIB = 1024**2


def line_of(text: str) -> int:
    """The first line of this file that has a text."""
    return next(number for number, line in enumerate(Path(__file__).read_text().splitlines(), 1) if text in line)


@BOTH
def test_outputs_that_are_kept_are_a_leak_of_their_layer_and_line(device):
    kept = []
    with on(device):
        loop = Loop(device)
        with mx.watch(loop.model, every=10) as live:
            for _ in range(STEPS):
                hidden = loop.model[:2](torch.randn(256, 64, device=device))
                loop.model[2](hidden).sum().backward()
                kept.append(hidden)
                loop.optimizer.step()
                loop.optimizer.zero_grad()
        leak, holders = live.leak(), live.held_by(seconds=60)
    assert leak is not None
    # 256 × 128 float32 after the activation; the output of the linear layer is freed.
    assert leak.bytes_per_step == 256 * 128 * 4
    assert leak.layer == "1"
    assert leak.line == f"{__file__}:{line_of('hidden = loop.model[:2]')}"
    assert holders == [f"{__file__}:{line_of('kept.append(hidden)')}: kept.append(hidden)"]
    assert "Memory grows by 128 KiB a step" in leak.text


def test_a_leak_of_a_gpu_says_when_it_will_be_full():
    kept = []
    with on("cuda"):
        loop = Loop("cuda")
        with mx.watch(loop.model, every=10) as live:
            for _ in range(STEPS):
                loop.step()
                kept.append(torch.empty(2 * 1024**2, dtype=torch.uint8, device="cuda"))
    leak = live.leak()
    assert leak.bytes_per_step == 2 * 1024**2
    reserved = int(live.steps()["reserved_after"].iloc[-1])
    assert leak.full_at == STEPS + -(-(live.capacity - reserved) // (2 * 1024**2))


@BOTH
@pytest.mark.parametrize("kept", [1, 5])
def test_a_cache_that_is_full_is_no_leak(device, kept):
    with on(device):
        loop = Loop(device)
        last: deque[torch.Tensor] = deque(maxlen=kept)
        with mx.watch(loop.model, every=10) as live:
            for _ in range(STEPS):
                last.append(loop.loss(256))
                last[-1].backward()
                loop.optimizer.step()
                loop.optimizer.zero_grad()
    assert live.leak() is None
    assert live.held_by() == []


@BOTH
def test_training_without_a_leak_has_none(device):
    with on(device):
        loop = Loop(device)
        with mx.watch(loop.model, every=10) as live:
            for step in range(STEPS):
                loop.step(8 + step % 5)
    assert live.leak() is None


def test_growth_that_begins_late_is_found():
    kept = []
    with on("cuda"):
        loop = Loop("cuda")
        with mx.watch(loop.model, every=1000) as live:
            for step in range(3 * STEPS):
                loop.step()
                if step >= 2 * STEPS:
                    kept.append(torch.empty(1024**2, dtype=torch.uint8, device="cuda"))
    leak = live.leak()
    assert leak.bytes_per_step == 1024**2
    assert abs(leak.since - 2 * STEPS) <= 2


def test_growth_that_begins_late_is_named_by_the_steps_since_then():
    kept = []
    with on("cuda"):
        loop = Loop("cuda")
        with mx.watch(loop.model, first=3, every=10) as live:
            for step in range(1, 321):
                loop.step()
                if step > 270:
                    kept.append(torch.ones(1024**2, dtype=torch.uint8, device="cuda"))
    leak = live.leak()
    assert (leak.bytes_per_step, abs(leak.since - 270) <= 3) == (1024**2, True)
    assert leak.line == f"{__file__}:{line_of('torch.ones(1024**2')}"


def test_few_recorded_steps_are_enough_to_name_the_line():
    kept = []
    with on("cuda"):
        loop = Loop("cuda")
        with mx.watch(loop.model, first=1, every=10**6) as live:
            for _ in range(6 * STEPS):
                loop.step()
                kept.append(torch.zeros(1024**2, dtype=torch.uint8, device="cuda"))
    assert live.leak().line == f"{__file__}:{line_of('torch.zeros(1024**2')}"


def test_a_peak_that_a_leak_raises_names_it():
    kept = []
    with on("cuda"):
        loop = Loop("cuda")
        with mx.watch(loop.model, first=1, every=10**6) as live:
            for _ in range(2 * STEPS):
                loop.step()
                kept.append(torch.empty(1024**2, dtype=torch.uint8, device="cuda"))
    assert live.steps()["rose_because"].iloc[-1].startswith("leak: ")


@BOTH
def test_who_holds_a_graph_is_found_by_its_result(device):
    # The largest blocks are kept by the autograd graphs alone.
    with on(device):
        loop = Loop(device)
        losses = []
        with mx.watch(loop.model, every=10) as live:
            for _ in range(STEPS):
                loop.step()
                losses.append(loop.loss(4096))
    assert live.held_by(60) == [f"{__file__}:{line_of('losses.append(')}: losses.append(loop.loss(4096))"]


@BOTH
def test_a_loss_that_holds_a_graph_of_many_layers_is_found(device):
    # On a virtual GPU the saved tensors of all layers are objects of Python, and they come before the loss.
    with on(device):
        model = torch.nn.Sequential(*[torch.nn.Linear(64, 64) for _ in range(8)]).to(device)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        history = []
        with mx.watch(model, every=10) as live:
            for _ in range(STEPS):
                loss = model(torch.randn(256, 64, device=device)).sum()
                loss.backward(retain_graph=True)
                optimizer.step()
                optimizer.zero_grad()
                history.append(loss)
    assert live.held_by(60) == [f"{__file__}:{line_of('history.append(loss)')}: history.append(loss)"]


def row(step: int, allocated: int) -> StepRow:
    return StepRow(step, 0.1, allocated + MIB, None, allocated, "", allocated + 2 * MIB)


def warnings_of(sizes: Iterable[int]) -> list[int]:
    """The steps after which a leak is reported, for bytes at the borders of steps on a device of 16 GiB."""
    leaks, found = Leaks(lambda: 16 * 1024**3), []
    for step, size in enumerate(sizes, 1):
        leaks.add(row(step, size), ())
        if leaks.find() is not None:
            found.append(step)
    return found


def test_sizes_that_vary_without_growing_are_no_leak():
    for seed in range(20):
        noise = np.random.default_rng(seed).integers(0, 4 * MIB, 300)
        assert warnings_of(2048 * MIB + size for size in noise.tolist()) == []


def test_blocks_whose_remainders_grow_are_no_leak():
    leaks = Leaks(lambda: 16 * 1024**3)
    for step in range(1, 101):
        leaks.add(
            StepRow(step, 0.1, allocated_after=10**9 + 500_000 * step, requested_after=10**9, reserved_after=2**31), []
        )
    assert leaks.find() is None


def test_growth_that_exceeds_the_variation_is_found():
    noise = np.random.default_rng(0).integers(0, 4 * MIB, 300)
    # 1 MiB a step is twice the variation of 4 MiB after 8 steps.
    found = warnings_of(2048 * MIB + size + step * MIB for step, size in enumerate(noise.tolist()))
    assert found[0] < 30
    assert found[-1] == 300


def test_a_holder_in_a_cell_is_named_as_in_a_traceback(monkeypatch):
    found = ["/tmp/ipykernel_12/34.py:3: losses.append(loop.loss(4096))"]
    monkeypatch.setattr("memexplore.live.leaks.holders.holders", lambda groups, seconds: found)
    with on("cuda"):
        loop, losses = Loop("cuda"), []
        with mx.watch(loop.model, every=10) as live:
            for _ in range(STEPS):
                loop.step()
                losses.append(loop.loss(4096))
    assert live.held_by() == ["Cell, line 3: losses.append(loop.loss(4096))"]


def test_the_search_for_holders_keeps_no_variable_of_the_loop_alive():
    value = torch.zeros(8)
    seen = weakref.ref(value)
    assert "value" in holders([[value.untyped_storage()]], 10.0)[0]
    value = None
    assert seen() is None
