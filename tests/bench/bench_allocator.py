"""`python -m tests.bench.bench_allocator`: events a second of `replay`, from ten thousand events to ten million."""

from __future__ import annotations

import argparse
import math
import random
import time
from collections.abc import Callable
from typing import Any

from memexplore.allocator import Settings, block_sizes, replay
from memexplore.tape import Action, Meta, Source, Tape

_STEP_SIZES = 400
"""Tensors alive at once at the peak of one synthetic training step."""


def training(events: int, seed: int = 0) -> Tape:
    """Return a tape like a training run: parameters stay, each step allocates in forward and frees in backward.

    It has temporaries too, and sizes vary between steps, so blocks are split and merged all the time.
    """
    dice = random.Random(seed)
    actions: list[int] = []
    addresses: list[int] = []
    sizes: list[int] = []
    name = 0

    def alloc(size: int) -> int:
        nonlocal name
        name += 1
        actions.append(Action.ALLOC)
        addresses.append(name)
        sizes.append(size)
        return name

    def free(block: int, size: int) -> None:
        actions.extend((Action.FREE_REQUESTED, Action.FREE_COMPLETED))
        addresses.extend((block, block))
        sizes.extend((size, size))

    shapes = [int(2 ** dice.uniform(8, 26)) for _ in range(_STEP_SIZES)]
    for shape in shapes:
        alloc(shape)
    while len(actions) < events:
        grow = dice.choice((1.0, 1.0, 1.0, 0.9, 1.1))
        alive = []
        for shape in shapes:
            size = int(shape * grow)
            alive.append((alloc(size), size))
            temporary = max(size // dice.choice((1, 2, 8)), 1)
            free(alloc(temporary), temporary)
        for block, size in reversed(alive):
            gradient = alloc(size)
            free(block, size)
            free(gradient, size)
    count = len(actions)
    columns = {"action": actions, "address": addresses, "size": sizes, "time": range(count)}
    return Tape.from_columns(columns, meta=Meta(Source.PREDICTED, "bench"))[:events]


def main() -> None:
    """Print the curve in processor seconds of one core, which do not depend on the load of the machine."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--most", type=int, default=10_000_000)
    parser.add_argument("--settings", default="")
    parser.add_argument("--repeat", type=int, default=3, help="number of runs, of which the best counts")
    options = parser.parse_args()
    settings = Settings.parse(options.settings)
    print(f"{'events':>10}  {'replay':>8}  {'events/s':>10}  {'ns/event':>8}  {'block_sizes':>11}  {'events/s':>10}")
    events = 10_000
    while events <= options.most:
        tape = training(events)
        seconds, result = _best(lambda tape=tape: replay(tape, settings), options.repeat)  # type: ignore[misc]
        sizes_seconds, _ = _best(lambda result=result: block_sizes(result), options.repeat)  # type: ignore[misc]
        print(
            f"{events:>10}  {seconds:7.2f}s  {events / seconds:>10,.0f}  {seconds / events * 1e9:>8.0f}"
            f"  {sizes_seconds:10.2f}s  {len(result) / sizes_seconds:>10,.0f}",
            flush=True,
        )
        events *= 10


def _best(function: Callable[[], Any], repeat: int) -> tuple[float, Any]:
    seconds = math.inf
    for _ in range(repeat):
        begin = time.process_time()
        result = function()
        seconds = min(seconds, time.process_time() - begin)
    return seconds, result


if __name__ == "__main__":
    main()
