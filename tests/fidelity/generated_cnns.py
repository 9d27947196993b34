"""Generated convolutional networks on an A100: `python -m tests.fidelity.generated_cnns` compares with nvidia-smi.

The project GPUMemNet (github itu-rad/GPUMemNet, `cnn_data_step1.csv`, 2024) trained random networks on an A100 of 40 GB
for a minute each, with Adam in float32, and kept the most memory that nvidia-smi saw: that of the allocator and what
lies outside it. `tests/data/a100_generated_cnns.csv` has every tenth of its 1 064 networks without branches that did
not run out of memory; `layers` are output channels and image side of each convolution (3 x 3), in front of which an
image of twice the side is pooled. The readings show that kernels were loaded eagerly: networks whose requests are small
have 1 679 MiB outside the allocator, and 1 719 with batch norm.
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
from memexplore.hardware.outside_allocator import Library, Loading

DATA = pathlib.Path(__file__).parent.parent / "data" / "a100_generated_cnns.csv"
GPU, RELEASE = "A100 40GB", "2.4"
"""The source names no release; it is of October 2024."""
_STEPS = 3
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
        modules: list[nn.Module] = []
        inputs, side = self.channels, self.side
        for outputs, own in self.layers:
            if own != side:
                modules.append(nn.MaxPool2d(2, 2))
            modules.append(nn.Conv2d(inputs, outputs, 3, padding=1))
            if self.has_batch_norm:
                modules.append(nn.BatchNorm2d(outputs))
            modules.append(_ACTIVATIONS[self.activation]())
            if self.dropout:
                modules.append(nn.Dropout(self.dropout))
            inputs, side = outputs, own
        return nn.Sequential(
            *modules, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(inputs, self.classes), nn.Softmax(1)
        )

    def images(self) -> torch.Tensor:
        """Return a batch of images on the CPU."""
        return torch.zeros(self.batch, self.channels, self.side, self.side)

    def train(self) -> None:
        """Do what the published script does: a summary in evaluation mode, then training steps with Adam."""
        model = self.build().cuda()
        self._summarize(model)
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

    def _summarize(self, model: nn.Module) -> None:
        images = self.images().cuda()
        with torch.no_grad():
            model.eval()(images)

    def _batches(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        for _ in range(_STEPS):
            yield self.images(), torch.zeros(self.batch, dtype=torch.long)

    def predicted(self) -> float:
        """Return the MiB that nvidia-smi would show: reserved, and outside the allocator with eager loading."""
        tape = mx.simulate(self.train, gpu=GPU, release=RELEASE)
        held = catalogue.find(GPU).loaded(Loading.EAGER).held_outside(RELEASE, frozenset(Library))
        assert held is not None
        return (mx.peak(tape if tape.whole is None else tape.whole, "reserved")[0] + held.bytes) / 2**20


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


def errors(chosen: list[Network]) -> np.ndarray:
    """Return the error of each prediction as a share of what was measured."""
    return np.array([network.predicted() / network.measured - 1 for network in chosen])


def main() -> None:
    """Print the errors by depth."""
    print("| convolutions | networks | median error | nine in ten within | worst |\n|---|--:|--:|--:|--:|")
    known = networks()
    for name, low, high in (("1 to 4", 1, 4), ("5 to 12", 5, 12), ("13 to 29", 13, 29), ("all", 1, 99)):
        found = abs(errors([each for each in known if low <= len(each.layers) <= high]))
        cells = (f"{share * 100:.1f} %" for share in (np.median(found), np.quantile(found, 0.9), found.max()))
        print(f"| {name} | {len(found)} | {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    sys.exit(main())
