"""Generated convolutional networks on an A100: `python -m tests.fidelity.generated_cnns` compares with nvidia-smi.

The project GPUMemNet (github itu-rad/GPUMemNet, `cnn_data_step1.csv`, 2024) trained random networks on an A100 of 40 GB
for a minute each, with Adam in float32, and kept the most memory that nvidia-smi saw: that of the allocator and what
lies outside it. `tests/data/a100_generated_cnns.csv` has every tenth of its 1 064 networks without branches that did
not run out of memory; `layers` are output channels and image side of each convolution (3 x 3), in front of which an
image of twice the side is pooled. The readings show that kernels were loaded eagerly: networks whose requests are small
have 1 679 MiB outside the allocator, and 1 719 with batch norm.

The script of that time (commit a79a76a) summarized the network with torchsummary, which runs two images in training
mode, and trained on 4 096 images for several epochs: the last batch of each is smaller. Both decide which segments the
allocator takes.
"""

from __future__ import annotations

import csv
import pathlib
import sys
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
import torch
from torch import nn

import memexplore as mx
from memexplore.hardware import catalogue
from memexplore.hardware.outside_allocator import Loading
from tests.fidelity.published_models import Answer, answer

DATA = pathlib.Path(__file__).parent.parent / "data" / "a100_generated_cnns.csv"
GPU, RELEASE = "A100 40GB", "2.4"
"""The source names no release; it is of October 2024."""
_IMAGES = 4096
"""Of an epoch."""
_ACTIVATIONS: dict[str, type[nn.Module]] = {
    "relu": nn.ReLU,
    "leaky_relu": nn.LeakyReLU,
    "prelu": nn.PReLU,
    "elu": nn.ELU,
    "selu": nn.SELU,
    "gelu": nn.GELU,
    "tanh": nn.Tanh,
    "swish": nn.SiLU,
    "softplus": nn.Softplus,
    "mish": nn.Mish,
}


class Network(NamedTuple):
    """One network of the file, and what nvidia-smi showed in MiB."""

    channels: int
    classes: int
    batch: int
    side: int
    activation: str
    dropout: float
    has_batch_norm: bool
    layers: tuple[tuple[int, int], ...]
    """Output channels and image side of each convolution."""
    measured: int

    def build(self) -> nn.Module:
        """Return the network with new weights."""
        blocks: list[nn.Module] = []
        inputs, side = self.channels, self.side
        for outputs, own in self.layers:
            if own != side:
                blocks.append(nn.MaxPool2d(2, 2))
            block = [nn.Conv2d(inputs, outputs, 3, padding=1), _ACTIVATIONS[self.activation]()]
            if self.has_batch_norm:
                block.insert(1, nn.BatchNorm2d(outputs))
            if self.dropout:
                block.append(nn.Dropout(self.dropout))
            blocks.append(nn.Sequential(*block))
            inputs, side = outputs, own
        head = [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(inputs, self.classes), nn.Softmax(1)]
        return nn.Sequential(*blocks, *head)

    def images(self, count: int) -> torch.Tensor:
        """Return images on the CPU."""
        return torch.zeros(count, self.channels, self.side, self.side)

    def train(self) -> None:
        """Do what the published script does: a summary, then training steps with Adam."""
        model = self.build().cuda()
        model(self.images(2).cuda())
        optimizer, criterion = torch.optim.Adam(model.parameters()), nn.CrossEntropyLoss()
        model.train()
        for images, labels in self._batches():
            images, labels = images.cuda(), labels.cuda()
            optimizer.zero_grad()
            outputs = model(images)
            loss = criterion(outputs, labels)
            loss.backward()
            optimizer.step()
            loss.item()

    def _batches(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        last = _IMAGES % self.batch
        for count in (self.batch, self.batch, *((last, self.batch) if last else ())):
            yield self.images(count), torch.zeros(count, dtype=torch.long)

    def answer(self) -> Answer:
        """Return what nvidia-smi would show: reserved, and outside the allocator with eager loading."""
        tape = mx.simulate(self.train, gpu=GPU, release=RELEASE)
        return answer(tape, catalogue.find(GPU).loaded(Loading.EAGER), RELEASE)


def networks() -> list[Network]:
    """Return the networks of the file."""
    with DATA.open(newline="") as file:
        return [
            Network(
                *(int(row[name]) for name in ("channels", "classes", "batch", "side")),
                row["activation"],
                float(row["dropout"]),
                row["batch norm"] == "1",
                tuple(
                    (int(outputs), int(side)) for outputs, side in (each.split("@") for each in row["layers"].split())
                ),
                int(row["MiB"]),
            )
            for row in csv.DictReader(file)
        ]


class Compared(NamedTuple):
    """Networks and what was measured of them."""

    errors: np.ndarray
    """Of each prediction, as a share of what was measured."""
    holds: np.ndarray
    """Whether what was measured is within 2 %, or in the range."""


def compared(chosen: list[Network]) -> Compared:
    """Predict networks."""
    pairs = [(network.answer(), network.measured) for network in chosen]
    errors = np.array([own.predicted / measured - 1 for own, measured in pairs])
    return Compared(errors, np.array([own.holds(measured) for own, measured in pairs]))


def main() -> None:
    """Print the errors by depth."""
    print("| convolutions | networks | median error | nine in ten within | worst | within 2 % or in the range |")
    print("|---|--:|--:|--:|--:|--:|")
    known = networks()
    for name, low, high in (("1 to 4", 1, 4), ("5 to 12", 5, 12), ("13 to 29", 13, 29), ("all", 1, 99)):
        found = compared([each for each in known if low <= len(each.layers) <= high])
        errors = abs(found.errors)
        shares = (np.median(errors), np.quantile(errors, 0.9), errors.max(), found.holds.mean())
        print(f"| {name} | {len(errors)} | {' | '.join(f'{share * 100:.1f} %' for share in shares)} |", flush=True)


if __name__ == "__main__":
    sys.exit(main())
