"""`python -m tests.fidelity.bert_large` prints BERT-large's published NVML totals beside what the virtual GPU says.

Indicative, not exact: they were taken with torch and transformers of January 2022, of which neither runs here. Run is
today's model with attention written out, AdamW one parameter at a time, gradients clipped and set to zero, under the
rules of torch 2.4.
"""

from __future__ import annotations

import csv
import gc

import torch
from torch import nn
from transformers import BertConfig, BertForSequenceClassification

from memexplore import capture
from tests.fidelity.cases import MIB, PUBLISHED


def model() -> nn.Module:
    config = BertConfig(
        vocab_size=30_522,
        hidden_size=1024,
        num_hidden_layers=24,
        num_attention_heads=16,
        intermediate_size=4096,
        attn_implementation="eager",
    )
    return BertForSequenceClassification(config).to("cuda").train()


def loaded() -> float:
    kept = model()
    size = torch.cuda.memory_reserved()
    del kept
    return size


def trained(batch: int, accumulated: int = 1, dtype: torch.dtype | None = None, steps: int = 3) -> float:
    """Peak reserved, in bytes, of a few training steps."""
    bert = model()
    optimizer = torch.optim.AdamW(bert.parameters(), foreach=False)
    scaler = torch.amp.GradScaler("cuda", enabled=dtype is not None)
    for _ in range(steps):
        for _ in range(accumulated):
            tokens = torch.randint(100, 30_000, (batch, 512), device="cuda")
            labels = torch.randint(0, 2, (batch,), device="cuda")
            with torch.autocast("cuda", dtype, enabled=dtype is not None):
                loss = bert(input_ids=tokens, labels=labels).loss / accumulated
            scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(bert.parameters(), 1.0, foreach=False)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad(set_to_none=False)
    return torch.cuda.max_memory_reserved()


RUNS = {
    "model loaded": loaded,
    "vanilla bs4": lambda: trained(4),
    "bs1 x GA4": lambda: trained(1, accumulated=4),
    "fp16 AMP bs4": lambda: trained(4, dtype=torch.float16),
}


def main() -> None:
    with PUBLISHED.open(newline="") as file:
        measured = {row["config"]: int(row["value"]) for row in csv.DictReader(file) if row["group"] == "bert-large"}
    context = measured["CUDA context+kernels only"]
    print("| run | measured (NVML) | predicted (reserved + context) | difference |\n|---|---|---|---|")
    for name, run in RUNS.items():
        with capture.virtual("V100 16GB", torch="2.4"):
            predicted = run() / MIB + context
        gc.collect()
        print(f"| {name} | {measured[name]} MiB | {predicted:.0f} MiB | {predicted / measured[name] - 1:+.1%} |")


if __name__ == "__main__":
    main()
