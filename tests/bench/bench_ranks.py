"""Opening a folder of 256 ranks with a million events each: seconds and peak memory of a new process.

`python -m tests.bench.bench_ranks [RANKS] [EVENTS]` writes the folder and opens it with `mx.load`: the ranks with the
worst first, what differs between the worst and a typical one, and one query over all events. Goal: the first two in
30 s and 2 GB. Four different tapes are written; the ranks share them as hard links, and have rows of their own.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

from memexplore.runs.rows import StepRow
from memexplore.runs.writer import Writer
from memexplore.tape import Action, Category, Frame, Meta, Phase, Source, Tape

STEPS = 2000
LAYERS = 200
DIFFERENT = 4

OPEN = """
import resource, sys, time
import memexplore as mx
began = time.perf_counter()
ranks = mx.load(sys.argv[1])
text = ranks.text
opened = time.perf_counter()
difference = ranks.difference()
compared = time.perf_counter()
peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024**2
events = ranks.query("SELECT rank, count(*) AS events, sum(size) FILTER (action = 0) AS s FROM events GROUP BY rank")
scanned = time.perf_counter()
print(text)
print(difference.text)
print(f"ranks: {opened - began:.1f} s · difference: {compared - opened:.1f} s · peak {peak:.2f} GiB")
print(f"one query over {events['events'].sum():,} events: {scanned - compared:.1f} s · "
      f"peak {resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024**2:.2f} GiB")
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


def write(folder: Path, ranks: int, events: int) -> None:
    """Write the folder of a run."""
    random = np.random.default_rng(0)
    for rank in range(ranks):
        writer = Writer(folder, rank, {"device": "cuda:0", "capacity": 80 << 30})
        peak = int(random.integers(1 << 30, 2 << 30))
        for step in range(1, STEPS + 1):
            writer.add(StepRow(step, 0.4, peak + step % 7, 2 * peak, peak // 2))
        writer.flush()
        if rank < DIFFERENT:
            writer.add_tape(7, tape(events, rank))
        else:
            os.link(folder / f"rank={rank % DIFFERENT}/tapes/step-7.parquet", writer.folder / "tapes/step-7.parquet")
        writer.describe("ended", "")


def main() -> None:
    ranks, events = (int(value) for value in (*sys.argv[1:], "256", "1000000")[:2])
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        began = time.perf_counter()
        write(folder, ranks, events)
        size = sum(path.stat().st_size for path in folder.rglob("*.parquet"))
        print(f"wrote {ranks} ranks, {size / 1024**3:.2f} GiB, in {time.perf_counter() - began:.0f} s", flush=True)
        subprocess.run([sys.executable, "-c", OPEN, str(folder)], check=True)


if __name__ == "__main__":
    main()
