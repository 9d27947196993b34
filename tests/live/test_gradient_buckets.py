"""Gradient buckets of DistributedDataParallel in predictions beside a watched run."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import memexplore as mx
from memexplore.live.gradient_buckets import Buckets, buckets_of
from memexplore.live.prediction import Prediction
from memexplore.run.knobs.knobs import Knobs

SECONDS = 200.0
WIDTH, LAYERS = 1024, 4
WEIGHTS = LAYERS * WIDTH * WIDTH * 4
"""Bytes of the weights, float32."""
MIB = 1024**2


def network() -> nn.Sequential:
    return nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS)))


def predicted(model: nn.Module, device: str) -> Prediction:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    with mx.watch(model, optimizer, first=4) as live:
        for _ in range(4):
            model(torch.randn(8, WIDTH, device=device)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        return live.predict(Knobs(), SECONDS)


@pytest.fixture
def on_two_gpus() -> Iterator[None]:
    with mx.virtual("T4"):
        dist.init_process_group("nccl", rank=0, world_size=2)
        yield


@pytest.mark.parametrize("options", [{}, {"gradient_as_bucket_view": True}, {"bucket_cap_mb": 2}])
def test_the_predicted_peak_of_ddp_is_what_is_measured(on_two_gpus: None, options: dict[str, Any]) -> None:
    found = predicted(DistributedDataParallel(network().cuda(), device_ids=[0], **options), "cuda")
    assert not found.failed
    assert found.unchanged_peak == found.measured_peak


def test_buckets_hold_as_much_as_the_gradients_beside_them(on_two_gpus: None) -> None:
    alone = predicted(network().cuda(), "cuda").unchanged_peak
    apart = predicted(DistributedDataParallel(network().cuda()), "cuda").unchanged_peak
    together = predicted(DistributedDataParallel(network().cuda(), gradient_as_bucket_view=True), "cuda").unchanged_peak
    assert alone is not None
    assert apart is not None
    assert together is not None
    # The peak is that of the update: weights, gradients and momentum, and the buckets.
    assert apart - alone == WEIGHTS
    # The gradient of one layer exists until it is copied into its bucket.
    assert 0 <= together - alone < 2 * WEIGHTS / LAYERS


def test_the_predicted_peak_of_ddp_on_the_cpu_is_near_the_recorded_one(tmp_path: Path) -> None:
    dist.init_process_group("gloo", init_method=f"file://{tmp_path / 'store'}", rank=0, world_size=1)
    try:
        found = predicted(DistributedDataParallel(network()), "cpu")
    finally:
        dist.destroy_process_group()
    assert found.unchanged_peak == pytest.approx(found.measured_peak, rel=0.01)


def test_the_sizes_of_buckets_are_those_of_the_wrapper(on_two_gpus: None) -> None:
    assert buckets_of(DistributedDataParallel(network().cuda())) == Buckets((MIB, 25 * MIB), False)
    small = DistributedDataParallel(network().cuda(), bucket_cap_mb=2, gradient_as_bucket_view=True)
    assert buckets_of(small) == Buckets((2 * MIB,), True)
    assert buckets_of(network()) is None
