"""One rank of a group of 1 024 beside one of 8 or 16, and Llama 70B on 256 GPUs: seconds on the virtual GPU.

`python -m tests.bench.bench_many_gpus [STRATEGY ...]` runs three recorded steps of a perceptron under each strategy in
turn in both groups, several rounds in one process, and prints the least processor times and their ratio; then it runs
Llama 70B, or with arguments only if `70b` is among them. Goals: 1.5, and 30 s on two cores.
"""

from __future__ import annotations

import sys
import time
import warnings
from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import memexplore as mx

ROUNDS, STEPS, WIDTH, BLOCKS, TENSOR = 3, 3, 2048, 12, 8
SMALL = {"DDP": 8, "FSDP2": 8, "HSDP": 16, "FSDP2 x TP": 16}
"""Ranks of the small group: two of the inner dimension of 8, where there are two."""
LARGE = 1024


class Seconds(NamedTuple):
    """Time of one run."""

    wall: float
    processor: float
    peak: int


def _perceptron() -> nn.Sequential:
    return nn.Sequential(
        *(nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.ReLU(), nn.Linear(4 * WIDTH, WIDTH)) for _ in range(BLOCKS))
    )


def _perceptron_of(strategy: str) -> nn.Module:
    ranks = dist.get_world_size()
    if strategy == "DDP":
        return nn.parallel.DistributedDataParallel(_perceptron().cuda())
    with torch.device("meta"):
        model = _perceptron()
    shape = (ranks,) if strategy == "FSDP2" else (ranks // TENSOR, TENSOR)
    mesh = dist.init_device_mesh("cuda", shape, mesh_dim_names=("outer", "inner")[: len(shape)])
    if strategy == "FSDP2 x TP":
        for block in model:
            parallelize_module(block, mesh["inner"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
        mesh = mesh["outer"]
    for block in model:
        fully_shard(block, mesh=mesh)
    return fully_shard(model, mesh=mesh).to_empty(device="cuda")


def perceptron(strategy: str, ranks: int) -> Seconds:
    """Run three steps of a perceptron as rank 0 of a group."""
    return _timed(ranks, lambda: _train(_perceptron_of(strategy), torch.ones(16, WIDTH)))


class Llama(nn.Module):
    """Llama 70B with tensor parallelism over 8 GPUs and FSDP2 over the others."""

    layers, hidden, inner, heads, groups, words, tokens = 80, 8192, 28672, 64, 8, 128256, 4096

    def __init__(self) -> None:
        from transformers import LlamaConfig, LlamaForCausalLM

        super().__init__()
        config = LlamaConfig(
            hidden_size=self.hidden,
            intermediate_size=self.inner,
            num_hidden_layers=self.layers,
            num_attention_heads=self.heads,
            num_key_value_heads=self.groups,
            vocab_size=self.words,
            use_cache=False,
        )
        with torch.device("meta"):
            self.model = LlamaForCausalLM(config)

    def shard(self) -> Llama:
        """Shard every layer, and allocate the shards."""
        mesh = dist.init_device_mesh(
            "cuda", (dist.get_world_size() // TENSOR, TENSOR), mesh_dim_names=("shard", "tensor")
        )
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        split = {
            f"self_attn.{name}_proj": RowwiseParallel() if name == "o" else ColwiseParallel() for name in "qkvo"
        } | {f"mlp.{name}_proj": RowwiseParallel() if name == "down" else ColwiseParallel() for name in _MLP}
        for layer in self.model.model.layers:
            parallelize_module(layer, mesh["tensor"], split)
            fully_shard(layer, mesh=mesh["shard"], mp_policy=policy)
        fully_shard(self.model, mesh=mesh["shard"], mp_policy=policy)
        return self.to_empty(device="cuda")

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Return the loss of a sequence."""
        loss: torch.Tensor = self.model(input_ids=tokens, labels=tokens).loss
        return loss


_MLP = ("gate", "up", "down")


def llama(ranks: int) -> Seconds:
    """Run three steps of Llama 70B as rank 0 of a group."""
    return _timed(ranks, lambda: _train(Llama().shard(), torch.zeros(1, Llama.tokens, dtype=torch.long)))


def _train(model: nn.Module, batch: torch.Tensor) -> None:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    for _ in range(STEPS):
        model(batch.cuda()).sum().backward()
        optimizer.step()
        optimizer.zero_grad()


def _timed(ranks: int, run: Callable[[], None]) -> Seconds:
    wall, processor = time.perf_counter(), time.process_time()
    with mx.virtual("H100", world=ranks), mx.record() as recording:
        dist.init_process_group("nccl")
        run()
    seconds = time.perf_counter() - wall, time.process_time() - processor
    return Seconds(*seconds, recording.tape.peak()[0])


def main() -> None:
    warnings.filterwarnings("ignore")
    chosen = sys.argv[1:] or [*SMALL, "70b"]
    for strategy, few in SMALL.items():
        if strategy not in chosen:
            continue
        perceptron(strategy, few)
        rounds = [(perceptron(strategy, few), perceptron(strategy, LARGE)) for _ in range(ROUNDS)]
        small, large = (min(run.processor for run in runs) for runs in zip(*rounds, strict=True))
        print(f"{strategy}: {few} ranks {small:.2f} s, {LARGE} ranks {large:.2f} s, {large / small:.2f}x", flush=True)
    if "70b" in chosen:
        for ranks in (256, LARGE):
            run = llama(ranks)
            print(
                f"Llama 70B, FSDP {ranks // TENSOR} x TP {TENSOR}, {STEPS} steps: {run.wall:.1f} s, "
                f"{run.processor:.1f} s processor time, peak {run.peak / 2**30:.2f} GiB",
                flush=True,
            )


if __name__ == "__main__":
    main()
