"""Cost of the settings of `values=`: time of a recorded training step, as a ratio to `none`, and to plain CPU training.

Run with ``python -m tests.bench.bench_values``. Each setting trains in turn, several times; the least processor time of
a step counts, so that other processes disturb it little.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

import memexplore as mx
from memexplore.virtual_gpu.values.setting import Values
from tests.models import MODELS

_ROUNDS = 3
_STEPS = 6


def _step(model: nn.Module, batch: Any, loss: Callable[..., torch.Tensor]) -> Callable[[], None]:
    optimizer = torch.optim.AdamW(model.parameters())

    def step() -> None:
        loss(model, batch).backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def _least(step: Callable[[], None]) -> float:
    """Return the least processor time of a step, in seconds, after two to warm up."""
    times = []
    for _ in range(2 + _STEPS):
        begin = time.process_time()
        step()
        times.append(time.process_time() - begin)
    return min(times[2:])


def _recorded(name: str, setting: Values) -> float:
    build, make_batch, loss = MODELS[name]
    with mx.virtual("192GiB", values=setting):
        model = build().to("cuda")
        step = _step(model, make_batch("cuda"), loss)
        with mx.record():
            return _least(step)


def _compare(name: str) -> None:
    best = {setting: float("inf") for setting in (Values.NONE, Values.KNOWN)}
    for _ in range(_ROUNDS):
        for setting in best:
            best[setting] = min(best[setting], _recorded(name, setting))
    none, known = best[Values.NONE], best[Values.KNOWN]
    print(f"{name:12} none {none * 1e3:7.1f} ms   known {known * 1e3:7.1f} ms   {known / none:.2f} x none")


def _small(device: str) -> float:
    """Return the time of a step of a small convolutional network."""
    torch.manual_seed(0)
    model = nn.Sequential(
        *(nn.Conv2d(3, 32, 3, padding=1), nn.BatchNorm2d(32), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Conv2d(32, 64, 3, padding=1), nn.ReLU(), nn.AdaptiveAvgPool2d(4), nn.Flatten(), nn.Linear(1024, 10)),
    ).to(device)
    images, labels = torch.randn(64, 3, 32, 32).to(device), torch.randint(10, (64,)).to(device)
    return _least(_step(model, images, lambda model, images: nn.functional.cross_entropy(model(images), labels)))


def _compare_real() -> None:
    on_cpu, real, none = float("inf"), float("inf"), float("inf")
    for _ in range(_ROUNDS):
        on_cpu = min(on_cpu, _small("cpu"))
        with mx.virtual("T4", values=Values.REAL):
            real = min(real, _small("cuda"))
        with mx.virtual("T4", values=Values.NONE):
            none = min(none, _small("cuda"))
    print(
        f"{'small CNN':12} none {none * 1e3:7.1f} ms   real {real * 1e3:8.1f} ms   plain CPU training "
        f"{on_cpu * 1e3:.1f} ms   {real / on_cpu:.2f} x plain"
    )


def main() -> None:
    """Print a line for each model."""
    for name in ("resnet50", "gpt2", "llama7b"):
        _compare(name)
    _compare_real()


if __name__ == "__main__":
    main()
