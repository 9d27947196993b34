"""Networks of convolutions on an A100: `python -m tests.fidelity.published_models` compares with nvidia-smi.

The authors of GPUMemNet (github itu-rad/GPUMemNet, Results_plotter_for_paper/data.csv, 2024) and of CARMA (github
itu-rad/CARMA, ehsan-summary.csv, September 2025) trained networks of torchvision and timm on ImageNet with Adam in
float32, on the same A100 of 40 GB, and kept the most memory that nvidia-smi saw. `tests/data/a100_models.csv` has both
readings and what three other estimators said of the first. The scripts summarize the network with two images, train
one epoch and validate; the last batch of each is smaller. In 2024 kernels were loaded eagerly (generated_cnns.py).

torchvision and timm build all networks but VGG16. As torchvision comes in CUDA builds only, give them an environment of
their own.
"""

from __future__ import annotations

import csv
import importlib
import pathlib
import sys
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import nn

import memexplore as mx
from memexplore.analysis.error_range import reserved_range
from memexplore.hardware import catalogue
from memexplore.hardware.catalogue import Gpu
from memexplore.hardware.outside_allocator import Library, Loading
from memexplore.tape import Tape

DATA = pathlib.Path(__file__).parent.parent / "data" / "a100_models.csv"
GPU = "A100 40GB"
TRAINED, VALIDATED = 1_281_167, 50_000
"""Images of ImageNet."""
ESTIMATORS = ("GPUMemNet", "FakeTensor", "Horus")


class Year(NamedTuple):
    """Readings of one year."""

    column: str
    release: str
    """torch release; the sources name none."""
    loading: Loading


YEARS = (Year("MiB 2024", "2.4", Loading.EAGER), Year("MiB 2025", "2.7", Loading.LAZY))


_VGG16 = (64, 64, 0, 128, 128, 0, 256, 256, 256, 0, 512, 512, 512, 0, 512, 512, 512, 0)
"""Output channels of the convolutions, 0 for a pooling (Simonyan and Zisserman 2014, configuration D)."""


def _vgg16() -> nn.Module:
    """Return the layers of torchvision's VGG16, in their order."""
    layers: list[nn.Module] = []
    inputs = 3
    for outputs in _VGG16:
        layers += [nn.Conv2d(inputs, outputs, 3, padding=1), nn.ReLU(True)] if outputs else [nn.MaxPool2d(2)]
        inputs = outputs or inputs
    layers += [nn.AdaptiveAvgPool2d(7), nn.Flatten()]
    for features in (25_088, 4_096):
        layers += [nn.Linear(features, 4_096), nn.ReLU(True), nn.Dropout()]
    layers.append(nn.Linear(4_096, 1_000))
    return nn.Sequential(*layers)


def _build(name: str) -> nn.Module:
    if name == "vgg16":
        return _vgg16()
    if name == "xception":
        return importlib.import_module("timm").create_model("legacy_xception", pretrained=False, num_classes=1000)
    options: dict[str, Any] = {"aux_logits": False, "init_weights": False} if name == "inception_v3" else {}
    return importlib.import_module("torchvision.models").get_model(name, weights=None, **options)


def train(name: str, batch: int) -> None:
    """Do what the published scripts do: a summary, training steps and a validation."""
    side = 299 if name == "inception_v3" else 224
    model = _build(name).cuda()
    model(torch.zeros(2, 3, side, side, device="cuda"))
    criterion, optimizer = nn.CrossEntropyLoss(), torch.optim.Adam(model.parameters(), lr=1e-3)
    for images, labels in _batches(batch, TRAINED, side):
        images, labels = images.cuda(), labels.cuda()
        optimizer.zero_grad()
        outputs = model(images)
        loss = criterion(outputs, labels)
        loss.backward()
        optimizer.step()
        loss.item()
    model.eval()
    with torch.no_grad():
        for images, labels in _batches(batch, VALIDATED, side):
            images, labels = images.cuda(), labels.cuda()
            outputs = model(images)
            criterion(outputs, labels).item()
            (torch.max(outputs, 1)[1] == labels).sum().item()


def _batches(batch: int, images: int, side: int) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    for count in (batch, batch, images % batch):
        yield torch.zeros(count, 3, side, side), torch.zeros(count, dtype=torch.long)


class Answer(NamedTuple):
    """What memexplore says of a reading, in MiB."""

    predicted: float
    low: float
    high: float

    def holds(self, measured: float) -> bool:
        """Return whether a reading is within 2 % of the prediction, or within its range."""
        return abs(self.predicted / measured - 1) <= 0.02 or self.low <= measured <= self.high


def answer(tape: Tape, gpu: Gpu, release: str) -> Answer:
    """Return what nvidia-smi would show of a run: reserved where there is room, and outside the allocator."""
    held = gpu.held_outside(release, frozenset(Library))
    assert held is not None
    whole = tape if tape.whole is None else tape.whole
    reserved = mx.peak(whole, "reserved")[0]
    expected = reserved_range(whole)
    sums = (reserved + held.bytes, expected.low + held.low, expected.high + held.high)
    return Answer(*(size / 2**20 for size in sums))


def answer_of(name: str, batch: int, year: Year) -> Answer:
    """Return what nvidia-smi would have shown of one of the trainings."""
    tape = mx.simulate(lambda: train(name, batch), gpu=GPU, release=year.release)
    return answer(tape, catalogue.find(GPU).loaded(year.loading), year.release)


def readings() -> list[tuple[dict[str, str], Year, float]]:
    """Return the rows of the file, each with a year and the MiB that were read then."""
    with DATA.open(newline="") as file:
        rows = list(csv.DictReader(file))
    return [(row, year, float(row[year.column])) for row in rows for year in YEARS if row[year.column]]


def _cell(predicted: float, measured: float) -> str:
    return f"{predicted:,.0f} ({(predicted / measured - 1) * 100:+.1f} %)"


def main() -> None:
    """Print each reading, the prediction, and those of the other estimators, who have answered for the first year."""
    print(f"| network | batch | year | measured | memexplore | range | {' | '.join(ESTIMATORS)} |")
    print(f"|---|--:|---|--:|--:|--:|{'--:|' * len(ESTIMATORS)}")
    errors: dict[str, list[float]] = {name: [] for name in ("memexplore", *ESTIMATORS)}
    held = []
    for row, year, measured in readings():
        own = answer_of(row["model"], int(row["batch"]), year)
        held.append(own.holds(measured))
        others = {name: float(row[name]) for name in ESTIMATORS} if year is YEARS[0] else {}
        for name, predicted in ({"memexplore": own.predicted} | others).items():
            errors[name].append(abs(predicted / measured - 1))
        cells = [row["model"], row["batch"], year.column[-4:], f"{measured:,.0f}", _cell(own.predicted, measured)]
        cells += [f"{own.low:,.0f} to {own.high:,.0f}", *(_cell(others[name], measured) for name in others)]
        print(f"| {' | '.join(cells)} |{' |' * (len(ESTIMATORS) - len(others))}", flush=True)
    for name, found in errors.items():
        print(f"{name}: median {np.median(found) * 100:.1f} %, worst {max(found) * 100:.1f} % of {len(found)}")
    print(f"memexplore: {sum(held)} of {len(held)} within 2 % or in the range")


if __name__ == "__main__":
    sys.exit(main())
