"""Opening a folder of 256 ranks with a million events each: seconds and peak memory of a new process.

`python -m tests.bench.bench_ranks [RANKS] [EVENTS]` writes a watched run and a folder of whole tapes, and opens each
with `mx.load`: the ranks with the worst first, what differs between the worst and a typical one, and the rows of all
steps. Goal: the first in a second, as it reads headers and descriptions only, and all in 2 GB. Four different tapes
are written; the ranks share them as hard links, and have rows of their own.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

from memexplore.ranks.rows import StepRow
from memexplore.ranks.writer import Writer
from memexplore.tape import Action, Category, Frame, Meta, Phase, Source, Tape

STEPS = 2000
LAYERS = 200
DIFFERENT = 4

OPEN = """
import resource, sys, time
import memexplore as mx
import pandas  # half a second, which is not that of the folder
began = time.perf_counter()
ranks = mx.load(sys.argv[1])
text = ranks.text
opened = time.perf_counter()
difference = ranks.difference()
compared = time.perf_counter()
steps = ranks.steps()
read = time.perf_counter()
peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024**2
print(text)
print(difference.text)
print(f"overview of {len(ranks)} ranks: {opened - began:.2f} s · difference: {compared - opened:.1f} s · "
      f"{len(steps):,} rows of steps: {read - compared:.1f} s · peak {peak:.2f} GiB")
"""


def tape(events: int, seed: int) -> Tape:
    """A tape of pairs of allocations and frees of layers, with a stack for each layer."""
    random = np.random.default_rng(seed)
    blocks = events // 3
    sizes = random.integers(1, 4096, blocks) * 512
    address = np.arange(blocks, dtype=np.int64) * (1 << 21)
    action = np.tile([Action.ALLOC, Action.FREE_REQUESTED, Action.FREE_COMPLETED], blocks)
    # A block lives while the next ones are allocated: frees come a thousand blocks later.
    row_block = np.repeat(np.arange(blocks), 3)
    order = np.argsort(row_block + np.where(action == Action.ALLOC, 0, 1000), kind="stable")
    layer = row_block % LAYERS
    columns = {
        "time": np.cumsum(random.integers(100, 5000, len(order))),
        "action": action[order],
        "address": address[row_block][order],
        "size": sizes[row_block][order],
        "category": np.full(len(order), Category.ACTIVATION),
        "phase": np.full(len(order), Phase.FORWARD),
        "step": np.full(len(order), 1),
        "module": layer[order],
        "stack": layer[order],
        "op": layer[order] % 7,
    }
    return Tape.from_columns(
        columns,
        meta=Meta(Source.MEASURED, "cuda:0"),
        ops=[f"aten::op{number}" for number in range(7)],
        modules=[f"layers.{number}" for number in range(LAYERS)],
        stacks=[(Frame("train.py", number, "step"),) for number in range(LAYERS)],
    )


def write(folder: Path, ranks: int, tapes: list[Path]) -> None:
    """Write the folder of a watched run."""
    random = np.random.default_rng(0)
    for rank in range(ranks):
        writer = Writer(folder, rank, {"device": "cuda:0", "capacity": 80 << 30})
        peak = int(random.integers(1 << 30, 2 << 30))
        for step in range(1, STEPS + 1):
            writer.add(StepRow(step, 0.4, peak + step % 7, 2 * peak, peak // 2))
        writer.flush()
        os.link(tapes[rank % DIFFERENT], writer.folder / "step-7.tape")
        writer.describe("ended", "")


def main() -> None:
    ranks, events = (int(value) for value in (*sys.argv[1:], "256", "1000000")[:2])
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        began = time.perf_counter()
        tapes = [folder / f"{seed}.tape" for seed in range(DIFFERENT)]
        for seed, path in enumerate(tapes):
            tape(events, seed).save(path)
        watched, whole = folder / "watched", folder / "whole"
        write(watched, ranks, tapes)
        whole.mkdir()
        for rank in range(ranks):
            os.link(tapes[rank % DIFFERENT], whole / f"rank-{rank}.tape")
        size = tapes[0].stat().st_size
        print(f"wrote tapes of {size / 1024**2:.1f} MiB in {time.perf_counter() - began:.0f} s", flush=True)
        for opened in (watched, whole):
            print(f"{opened.name}:", flush=True)
            subprocess.run([sys.executable, "-c", OPEN, str(opened)], check=True)


if __name__ == "__main__":
    main()
