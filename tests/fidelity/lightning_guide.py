"""The model of Lightning's guide to FSDP on two GPUs, as a script for `memexplore run` with `torchrun`'s environment.

memexplore run tests/fidelity/lightning_guide.py --gpu A100 --release 2.1 --world 2 -- FULL_SHARD

It prints the peak allocated in MB of 2^20 bytes, as `torch.cuda.memory_summary` does. The text of the guide, WikiText2,
is replaced by as many tokens of the same vocabulary.
"""

from __future__ import annotations

import sys
from typing import Any

import pytorch_lightning as lightning
import torch
from pytorch_lightning.demos import Transformer
from pytorch_lightning.strategies import FSDPStrategy
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

VOCABULARY = 33_278
TOKENS = 35


class LanguageModel(lightning.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.model = Transformer(vocab_size=VOCABULARY, nlayers=32, nhid=4096, ninp=1024, nhead=64)

    def training_step(self, batch: Any, *_: Any) -> torch.Tensor:
        tokens, target = batch
        return nn.functional.nll_loss(self.model(tokens, target), target.view(-1))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters(), lr=0.1)


def main(sharding: str) -> None:
    layers = {nn.TransformerEncoderLayer, nn.TransformerDecoderLayer}
    strategy: Any = "ddp"
    if sharding == "CPU_OFFLOAD":
        strategy = FSDPStrategy(auto_wrap_policy=layers, cpu_offload=True)
    elif sharding != "DDP":
        strategy = FSDPStrategy(auto_wrap_policy=layers, sharding_strategy=sharding)
    trainer = lightning.Trainer(
        accelerator="cuda", devices=2, strategy=strategy, max_epochs=1, logger=False, enable_checkpointing=False
    )
    tokens = torch.zeros(8, TOKENS, dtype=torch.long)
    trainer.fit(LanguageModel(), DataLoader(TensorDataset(tokens, tokens)))
    print(f"{sharding}: {torch.cuda.max_memory_allocated() / 2**20:.0f} MB")


if __name__ == "__main__":
    main(sys.argv[1])
