"""The cost of recording a virtual training step, beside the same step under a bare fake mode and under MemTracker.

`python -m tests.bench.bench_recording [MODEL ...]` runs forward, backward and AdamW of each model in turn under all
three, several rounds in one process, and prints medians and their ratios.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed._tools.mem_tracker import MemTracker

import memexplore as mx
from tests.models import MODELS

ROUNDS = 5


def _step(name: str, device: str) -> Callable[[], None]:
    build, make, loss = MODELS[name]
    model = build() if device == "cpu" else build().to(device)
    optimizer = torch.optim.AdamW(model.parameters(), foreach=True)
    batch = make(device)

    def step() -> None:
        loss(model, batch).backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def _times(step: Callable[[], None], before: Callable[[], None] = lambda: None) -> list[float]:
    times = []
    for _ in range(ROUNDS):
        before()
        start = time.perf_counter()
        step()
        times.append(time.perf_counter() - start)
    return times


def measure(name: str) -> dict[str, float]:
    """Median seconds of one step, the first two left out: caches are filled by then in all three."""
    result: dict[str, float] = {}
    with FakeTensorMode():
        step = _step(name, "cpu")
        step(), step()
        result["bare fake mode"] = statistics.median(_times(step))
        with MemTracker() as tracker:
            step()
            # MemTracker counts one step at a time and asks to be reset before the next.
            result["MemTracker"] = statistics.median(_times(step, tracker.reset_mod_stats))
    with mx.virtual("192GiB"):
        step = _step(name, "cuda")
        step(), step()
        with mx.record():
            step()
            result["memexplore"] = statistics.median(_times(step))
    return result


def main() -> None:
    print(f"{'step':>10} {'bare':>9} {'MemTracker':>11} {'memexplore':>11} {'over bare':>10} {'over MemTracker':>16}")
    for name in sys.argv[1:] or ["resnet50", "gpt2", "llama7b"]:
        times = measure(name)
        bare, tracker, ours = times["bare fake mode"], times["MemTracker"], times["memexplore"]
        print(
            f"{name:>10} {bare * 1e3:>6.0f} ms {tracker * 1e3:>8.0f} ms {ours * 1e3:>8.0f} ms "
            f"{ours / bare:>9.2f}x {ours / tracker:>15.2f}x"
        )


if __name__ == "__main__":
    main()
