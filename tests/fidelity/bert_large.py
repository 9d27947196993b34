"""`python -m tests.fidelity.bert_large` prints BERT-large's published NVML totals beside the virtual GPU's answers.

The totals are of January 2022 and their source names no torch release. Three columns: today's model with attention
written out, and the same with what torch 1.10 or 1.9 and transformers 4.15 did otherwise written here by hand, all
under the allocator of torch 2.4.
"""

from __future__ import annotations

import csv
import enum
import gc
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from transformers import AttentionInterface, BertConfig, BertForSequenceClassification

from memexplore.run.machine import virtual
from tests.data.kept import PUBLISHED_PEAKS
from tests.fidelity.cases import MIB


class Era(enum.Enum):
    TODAY = "today's code"
    TORCH_1_10 = "as with torch 1.10"
    TORCH_1_9 = "as with torch 1.9"


class Kept(torch.autograd.Function):
    """The tensor itself, kept until the backward pass: 24 layers x 16 heads x 512 x 512 x 4 B = 384 MiB a sample."""

    @staticmethod
    def forward(ctx: Any, scores: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(scores)
        return scores.view_as(scores)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> torch.Tensor:
        return gradients[0]


def attention(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    _mask: torch.Tensor | None,
    scaling: float,
    dropout: float = 0.0,
    **_: Any,
) -> tuple[torch.Tensor, None]:
    """Attention as in torch up to 1.10: softmax saved its input too (pytorch/pytorch#64000, fixed in 1.11)."""
    scores = query @ key.transpose(2, 3) * scaling
    # transformers 4.15 added a mask in the model's float32, which autocast leaves alone: the sum is float32.
    scores = scores + torch.zeros(len(query), 1, 1, key.shape[2], device=query.device)
    weights = nn.functional.softmax(Kept.apply(scores), dim=-1)
    weights = nn.functional.dropout(weights, dropout, module.training)
    # The weights are not returned: today's layer would keep them to its end, that of 4.15 freed them.
    return (weights @ value).transpose(1, 2).contiguous(), None


AttentionInterface.register("softmax_input_kept", attention)


class FloatGelu(nn.Module):
    """GELU in float32, as autocast had it before pytorch/pytorch#59639, which was opened after 1.9 was branched off."""

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return nn.functional.gelu(inputs.float())


class Adam(torch.optim.Optimizer):
    """Adam with the temporaries of transformers 4.15: one a parameter, freed only when the next one is allocated."""

    def __init__(self, parameters: Iterator[nn.Parameter]) -> None:
        super().__init__(parameters, {"lr": 5e-5})

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for parameter in self.param_groups[0]["params"]:
            moments = self.state[parameter]
            if not moments:
                moments["first"] = torch.zeros_like(parameter)
                moments["second"] = torch.zeros_like(parameter)
            moments["first"].lerp_(parameter.grad, 0.1)
            moments["second"].mul_(0.999).addcmul_(parameter.grad, parameter.grad, value=0.001)
            spread = moments["second"].sqrt().add_(1e-6)
            parameter.addcdiv_(moments["first"], spread, value=-self.param_groups[0]["lr"])


def model(era: Era) -> nn.Module:
    config = BertConfig(
        vocab_size=30_522,
        hidden_size=1024,
        num_hidden_layers=24,
        num_attention_heads=16,
        intermediate_size=4096,
        attn_implementation="eager" if era is Era.TODAY else "softmax_input_kept",
    )
    bert = BertForSequenceClassification(config)
    if era is Era.TORCH_1_9:
        for layer in bert.bert.encoder.layer:
            layer.intermediate.intermediate_act_fn = FloatGelu()
    return bert.to("cuda").train()


def optimizer_of(era: Era, parameters: Iterator[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, foreach=False) if era is Era.TODAY else Adam(parameters)


def loaded(era: Era) -> float:
    kept = model(era)
    size = torch.cuda.memory_reserved()
    del kept
    return size


def trained(era: Era, batch: int, accumulated: int = 1, dtype: torch.dtype | None = None, steps: int = 3) -> float:
    """Peak reserved, in bytes, of a few training steps."""
    bert = model(era)
    optimizer = optimizer_of(era, bert.parameters())
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
    "vanilla bs4": lambda era: trained(era, 4),
    "bs1 x GA4": lambda era: trained(era, 1, accumulated=4),
    "fp16 AMP bs4": lambda era: trained(era, 4, dtype=torch.float16),
}


def main() -> None:
    with PUBLISHED_PEAKS.open(newline="") as file:
        measured = {row["config"]: int(row["value"]) for row in csv.DictReader(file) if row["group"] == "bert-large"}
    context = measured["CUDA context+kernels only"]
    print("Predicted is reserved + context, in MiB.\n")
    print(f"| run | measured (NVML) | {' | '.join(era.value for era in Era)} |\n|---|---|---|---|---|")
    for name, run in RUNS.items():
        cells = [f"{measured[name]} MiB"]
        for era in Era:
            with virtual("V100 16GB", release="2.4"):
                predicted = run(era) / MIB + context
            gc.collect()
            cells.append(f"{predicted:.0f} ({predicted / measured[name] - 1:+.1%})")
        print(f"| {name} | {' | '.join(cells)} |")


if __name__ == "__main__":
    main()
