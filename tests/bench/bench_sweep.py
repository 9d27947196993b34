"""The cost of a sweep of 200 settings beside 200 runs of PyTorch's MemTracker.

`python -m tests.bench.bench_sweep [MODEL ...] [--settings N] [--sample N]` runs all settings of each model with
`sweep`, and a sample of the same settings, spread evenly, under MemTracker in a bare fake mode: two steps with AdamW,
as ours runs two. The sample's mean is scaled to all settings, which the output says. Building the model and starting
processes (one a processor) count on our side; MemTracker runs in this process, its model is built beforehand.
"""

from __future__ import annotations

import argparse
import time

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed._tools.mem_tracker import MemTracker

from memexplore.run.knobs.knobs import Knobs
from memexplore.run.programs.step import Step
from memexplore.run.search.sweep import sweep
from tests.models import MODELS


def settings(count: int) -> list[Knobs]:
    """Settings that MemTracker can run as well: batches and precisions."""
    return [Knobs(batch=1 + number // 2, precision=("off", "bf16")[number % 2]) for number in range(count)]


def tracked(name: str, chosen: list[Knobs]) -> list[float]:
    """Seconds of two steps of a model under MemTracker, with each batch and precision."""
    build, make, loss = MODELS[name]
    times = []
    with FakeTensorMode():
        model = build()
        optimizer = torch.optim.AdamW(model.parameters(), foreach=True)
        for knobs in chosen:
            batch = tuple(torch.empty((knobs.batch, *one.shape[1:]), dtype=one.dtype) for one in make("cpu"))
            start = time.perf_counter()
            tracker = MemTracker()
            tracker.track_external(model, optimizer)
            with tracker:
                for _ in range(2):
                    with torch.autocast("cpu", torch.bfloat16, enabled=knobs.precision.value == "bf16"):
                        value = loss(model, batch)
                    value.backward()
                    optimizer.step()
                    optimizer.zero_grad()
                    # MemTracker counts one step at a time and asks to be reset before the next.
                    tracker.reset_mod_stats()
            times.append(time.perf_counter() - start)
    return times


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("models", nargs="*", default=["resnet50", "gpt2"])
    parser.add_argument("--settings", type=int, default=200)
    parser.add_argument("--sample", type=int, default=4)
    asked = parser.parse_args()
    chosen = settings(asked.settings)
    for name in asked.models:
        build, make, loss = MODELS[name]
        step = Step(build, make("cpu"), compute_loss=loss)
        start = time.perf_counter()
        found = sweep(step, chosen, gpu="A100", progress=None)
        ours = time.perf_counter() - start
        assert not found.errors, found.errors
        every = max(len(chosen) // asked.sample, 1)
        times = tracked(name, chosen[every // 2 :: every])
        theirs = sum(times) / len(times) * len(chosen)
        print(
            f"{name}: {len(chosen)} settings in {ours:.1f} s ({ours / len(chosen) * 1e3:.0f} ms each); "
            f"MemTracker {theirs:.0f} s, scaled from {len(times)} runs of {sum(times):.1f} s; "
            f"ratio {ours / theirs:.4f}, or 1 to {theirs / ours:.0f}"
        )


if __name__ == "__main__":
    main()
