"""The same small training loop under plain torch, transformers' Trainer, Lightning and accelerate."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytorch_lightning
import torch
import transformers
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset

transformers.utils.logging.set_verbosity_error()
warnings.filterwarnings("ignore", module="pytorch_lightning")
WIDTH, BATCH = 256, 32


class Samples(Dataset):  # type: ignore[type-arg]
    """Samples of which each is computed from its number."""

    def __init__(self, count: int, failing: int | None = None) -> None:
        self.count, self.failing = count, failing

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        if index == self.failing:
            raise ValueError("a damaged sample")
        return {"x": torch.full((WIDTH,), index / self.count), "labels": torch.tensor(index % 8)}


class Net(nn.Module):
    """A perceptron that returns its loss, as models of transformers do."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, 8))

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        logits = self.body(x)
        return {"loss": F.cross_entropy(logits, labels), "logits": logits}


def net() -> Net:
    torch.manual_seed(0)
    return Net()


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-3)


def loader(steps: int, accumulation: int = 1, failing: int | None = None) -> DataLoader[Any]:
    return DataLoader(Samples(steps * accumulation * BATCH, failing), batch_size=BATCH)


def arguments(folder: Any, **options: Any) -> transformers.TrainingArguments:
    options = {
        "per_device_train_batch_size": BATCH,
        "per_device_eval_batch_size": BATCH,
        "num_train_epochs": 1,
        "max_grad_norm": 0.0,
        "save_strategy": "no",
        "logging_strategy": "no",
        **options,
    }
    return transformers.TrainingArguments(output_dir=str(folder), report_to=[], disable_tqdm=True, **options)


class Module(pytorch_lightning.LightningModule):
    """The same model as a LightningModule, which calls its layers, and its loss, one by one."""

    def __init__(self, on_step: Callable[[int], object] | None = None) -> None:
        super().__init__()
        self.body = net().body
        self.criterion = nn.CrossEntropyLoss()
        self.on_step = on_step

    def training_step(self, batch: dict[str, torch.Tensor], batch_idx: int) -> torch.Tensor:
        if self.on_step is not None:
            self.on_step(batch_idx)
        return self.criterion(self.body[2](self.body[1](self.body[0](batch["x"]))), batch["labels"])

    def validation_step(self, batch: dict[str, torch.Tensor], batch_idx: int) -> None:
        self.criterion(self.body(batch["x"]), batch["labels"])

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return sgd(self)


def lightning(callback: Any, **options: Any) -> pytorch_lightning.Trainer:
    options = {"max_epochs": 1, "accelerator": "auto", "devices": 1, "num_sanity_val_steps": 0, **options}
    return pytorch_lightning.Trainer(
        callbacks=[callback],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        **options,
    )
