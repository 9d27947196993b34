"""Published peaks of several GPUs beside what one rank of the virtual GPU allocates (docs/many_gpus.md).

`python -m tests.fidelity.many_gpus` prints the table; with a folder that holds torchtitan at
`torchtitan.COMMIT`, its `train.py` is run too.
"""

from __future__ import annotations

import pathlib
import statistics
import sys
from collections.abc import Iterator
from typing import NamedTuple

import torch

import memexplore as mx
from memexplore.analysis.placements import peak_ranges
from tests.fidelity import sharded_llama, sharded_lm, sharded_mlp, sharded_xl, torchtitan
from tests.fidelity.sharded_xl import Sharding

MIB, GIB = 2**20, 2**30
REPORT = "brandon-snider/cs336-a2@49cf3d4 writeup.typ, optimizer state sharding"
XL_REPORT = "EnzoDing-rgb/cs336-assignment2-systems@9cb4efb reports/distributed-communication.md, 8.2 and 9.2"
LLAMA_REPORT = "Lightning-AI/lightning-thunder pull request 940, eager, FSDP2"
LLAMA_PUBLISHED = "47.45"
"""GB of 10^9 bytes."""
MLP_REPORT = "a note, Notes on FSDP, with a script ddp_vs_fsdp.py"
MLP_PUBLISHED = {
    sharded_mlp.Strategy.DDP: "9265",
    sharded_mlp.Strategy.FSDP1: "2496",
    sharded_mlp.Strategy.FSDP2: "2504",
}
"""MB of 2^20 bytes, cut to whole ones."""
BENCHMARK = "pytorch/torchtitan benchmarks/llama3_h100_202412_torchtitan.md"


class Row(NamedTuple):
    """A peak that others measured; both values in the unit and with the digits of the source."""

    what: str
    gpus: int
    published: str
    predicted: str
    source: str


PUBLISHED = {False: ("7804.65", "34104.87", "31564.80"), True: ("7804.65", "26312.84", "23723.84")}
"""Sharded optimizer or not -> means of both ranks, MB of 2^20 bytes: model made, before the update, in the update."""


def sharded_optimizer(sharded: bool) -> Iterator[Row]:
    """Run two ranks of a model of two billion parameters, with a sharded optimizer or without."""
    ranks = []
    for rank in (0, 1):
        with mx.virtual("H100", release="2.6", world=2, rank=rank):
            ranks.append(sharded_lm.train(sharded))
    name = "a sharded optimizer" if sharded else "AdamW on every rank"
    for field, expected in zip(ranks[0]._fields, PUBLISHED[sharded], strict=True):
        mean = statistics.mean(getattr(peaks, field) for peaks in ranks)
        what = f"LM of 2.0 billion parameters, {name}, {field}, allocated MB"
        yield Row(what, 2, expected, f"{mean / MIB:.2f}", REPORT)


class XlRun(NamedTuple):
    """A run of the language model with 3.4 billion parameters."""

    sharding: Sharding
    dtype: torch.dtype | None
    gpus: int
    published: str
    """GiB, the mean of the ranks."""


XL_RUNS = (
    XlRun(Sharding.NOTHING, None, 2, "52.1"),
    XlRun(Sharding.OPTIMIZER, None, 2, "39.4"),
    XlRun(Sharding.WEIGHTS, None, 2, "39.2"),
    XlRun(Sharding.WEIGHTS, None, 4, "24.5"),
    XlRun(Sharding.WEIGHTS, torch.bfloat16, 2, "29.3"),
    XlRun(Sharding.WEIGHTS, torch.bfloat16, 4, "17.4"),
)


def xl_range(run: XlRun) -> tuple[float, float]:
    """Return the lowest and the highest peak allocated, in GiB, as means of the ranks."""
    ranges = []
    for rank in (0, 1):  # the weights that ranks 2 and 3 own have the sizes of those of 0 and 1
        tape = mx.simulate(
            lambda: sharded_xl.train(run.sharding, run.dtype),
            gpu="RTX PRO 6000 Server",
            release="2.11",
            world=run.gpus,
            rank=rank,
        )
        found = peak_ranges(tape)
        assert found is not None
        ranges.append(found.allocated)
    lowest, highest = (statistics.mean(ends) / GIB for ends in zip(*ranges, strict=True))
    return lowest, highest


def xl_rows() -> Iterator[Row]:
    """Run two ranks of each run of the model of 3.4 billion parameters."""
    for run in XL_RUNS:
        ends = dict.fromkeys(f"{end:.1f}" for end in xl_range(run))
        what = f"LM of 3.4 billion parameters, {run.sharding.value}, {'bf16' if run.dtype else 'fp32'}, allocated GiB"
        yield Row(what, run.gpus, run.published, " to ".join(ends), XL_REPORT)


def llama() -> Row:
    """Run one rank of Llama 2 7B."""
    with mx.virtual("H100", release="2.5", world=8):
        peak = sharded_llama.train()
    what = "Llama 2 7B, FSDP2 without resharding, bf16, 4 096 tokens, allocated GB"
    return Row(what, 8, LLAMA_PUBLISHED, f"{peak / 1e9:.2f}", LLAMA_REPORT)


def perceptron(strategy: sharded_mlp.Strategy) -> Row:
    """Run one rank of a perceptron."""
    with mx.virtual("A100", release="2.7", world=4):
        peak = sharded_mlp.train(strategy)
    what = f"perceptron of 6 x 8 192 units, {strategy.value}, allocated MB"
    return Row(what, 4, MLP_PUBLISHED[strategy], str(peak // MIB), MLP_REPORT)


def torchtitan_runs(folder: pathlib.Path) -> Iterator[Row]:
    """Run torchtitan's own `train.py` of December 2024 as one of 8 and of 128 ranks."""
    for world, published in torchtitan.PUBLISHED.items():
        predicted = torchtitan.reserved(folder, world)
        what = "torchtitan's train.py, Llama 3.1 8B, FSDP2, 2 x 8 192 tokens, reserved GiB"
        yield Row(what, world, published, predicted, BENCHMARK)


def main() -> None:
    rows = [
        *sharded_optimizer(False),
        *sharded_optimizer(True),
        *xl_rows(),
        llama(),
        *map(perceptron, sharded_mlp.Strategy),
        *(torchtitan_runs(pathlib.Path(sys.argv[1])) if sys.argv[1:] else ()),
    ]
    print("| run | GPUs | published | memexplore | source |\n|---|---|---|---|---|")
    for row in rows:
        print("|", " | ".join(map(str, row)), "|", flush=True)


if __name__ == "__main__":
    main()
