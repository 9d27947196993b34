"""The cost of watching: a lightly watched step beside an unwatched one, a recorded step beside one under MemTracker.

`python -m tests.bench.bench_live [light] [recorded] [virtual]` runs both sides in turn in one process, in short rounds,
and prints seconds and their ratios. Goals: a lightly watched step takes at most 1.03 times an unwatched one from 20 ms
on and 1.10 times at 2 ms; a recorded step on the CPU has at most a fifth of the overhead of MemTracker.
"""

from __future__ import annotations

import contextlib
import gc
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator

import torch
from torch import nn
from torch.distributed._tools.mem_tracker import MemTracker

import memexplore as mx

KEEP_HEAP = {"MALLOC_TRIM_THRESHOLD_": str(1 << 40), "MALLOC_MMAP_THRESHOLD_": str(32 << 20)}
"""glibc keeps freed memory. Otherwise it returns some to the system, or none, depending on where small objects lie on
the heap: the same unwatched step takes 40 or 2000 page faults."""
ROUNDS = 10
ROUNDS_OF_DIFFERENCES = 30
"""A difference of two times is a tenth of each, so that it needs more of them."""
NEVER = 10**9
Step = Callable[[], None]


def perceptron(width: int, batch: int, layers: int) -> tuple[nn.Module, torch.Tensor]:
    modules = [module for _ in range(layers) for module in (nn.Linear(width, width), nn.ReLU())]
    return nn.Sequential(*modules), torch.randn(batch, width)


def transformer(width: int, batch: int, length: int, layers: int) -> tuple[nn.Module, torch.Tensor]:
    layer = nn.TransformerEncoderLayer(width, 4, 4 * width, batch_first=True, dropout=0.0)
    return nn.TransformerEncoder(layer, layers), torch.randn(batch, length, width)


MODELS: dict[str, Callable[[], tuple[nn.Module, torch.Tensor]]] = {
    "perceptron 2 ms": lambda: perceptron(256, 64, 5),
    "transformer 2 ms": lambda: transformer(64, 4, 16, 2),
    "perceptron 20 ms": lambda: perceptron(512, 256, 8),
    "transformer 20 ms": lambda: transformer(128, 8, 64, 2),
}


def prepared(name: str, device: str) -> tuple[nn.Module, Step]:
    """Return a model and its training step."""
    torch.manual_seed(0)
    model, batch = MODELS[name]()
    model, batch = model.to(device), batch.to(device)
    optimizer = torch.optim.AdamW(model.parameters())

    def step() -> None:
        model(batch).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    return model, step


@contextlib.contextmanager
def watched_lightly(model: nn.Module) -> Iterator[None]:
    """Watch in the block, with no step recorded completely."""
    with mx.watch(model, first=0, every=NEVER) as live:
        live._session.watcher.schedule.on_new_shapes = lambda: False  # type: ignore[method-assign]
        yield


def in_turn(
    sides: dict[str, Callable[[], contextlib.AbstractContextManager[object]]],
    step: Step,
    before: Callable[[], object] = lambda: None,
    rounds: int = ROUNDS,
) -> dict[str, float]:
    """Return the seconds of one step for each side: the median of all, in processor time of one thread.

    The sides take turns in short rounds.

    `before` is called before each step and is not timed.
    """
    step(), step()
    # What was made so far is not walked again by each collection.
    gc.collect()
    gc.freeze()
    began = time.perf_counter()
    step()
    count = max(8, int(0.1 / (time.perf_counter() - began)))
    seconds: dict[str, list[float]] = {name: [] for name in sides}
    for number in range(rounds):
        for name, context in list(sides.items())[:: 1 if number % 2 else -1]:
            with context():
                for _ in range(2):
                    before()
                    step()
                for _ in range(count):
                    before()
                    began = time.process_time()
                    step()
                    seconds[name].append(time.process_time() - began)
    return {name: statistics.median(values) for name, values in seconds.items()}


def light(device: str) -> None:
    print(f"{'step on ' + device:>20} {'unwatched':>10} {'watched':>10} {'ratio':>7}")
    for name in MODELS:
        model, step = prepared(name, device)
        times = in_turn({"plain": contextlib.nullcontext, "watched": lambda: watched_lightly(model)}, step)  # noqa: B023
        plain, watched = times["plain"], times["watched"]
        print(f"{name:>20} {plain * 1e3:>7.2f} ms {watched * 1e3:>7.2f} ms {watched / plain:>6.3f}x")


def recorded() -> None:
    print(f"{'step on cpu':>20} {'plain':>10} {'recorded':>10} {'MemTracker':>11} {'overheads':>10}")
    for name in MODELS:
        model, step = prepared(name, "cpu")
        tracker = MemTracker()
        sides = {
            "plain": contextlib.nullcontext,
            "recorded": lambda: mx.watch(model, first=NEVER),  # noqa: B023
            "tracker": lambda: tracker,  # noqa: B023
        }
        times = in_turn(sides, step, tracker.reset_mod_stats, ROUNDS_OF_DIFFERENCES)
        ours, theirs = times["recorded"] - times["plain"], times["tracker"] - times["plain"]
        print(
            f"{name:>20} {times['plain'] * 1e3:>7.2f} ms {times['recorded'] * 1e3:>7.2f} ms "
            f"{times['tracker'] * 1e3:>8.2f} ms {ours / theirs:>9.3f}x"
        )


def main() -> None:
    if not KEEP_HEAP.items() <= os.environ.items():
        # glibc reads these at the start of a process.
        command = [sys.executable, "-m", "tests.bench.bench_live", *sys.argv[1:]]
        os.execve(sys.executable, command, {**os.environ, **KEEP_HEAP})
    torch.set_num_threads(1)
    chosen = sys.argv[1:] or ["light", "recorded", "virtual"]
    if "light" in chosen:
        light("cpu")
    if "virtual" in chosen:
        with mx.virtual("T4"):
            light("cuda")
    if "recorded" in chosen:
        recorded()


if __name__ == "__main__":
    main()
