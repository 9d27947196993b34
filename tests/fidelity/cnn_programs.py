"""Programs whose peaks `tests/data/published_cnns.csv` has, written from their descriptions: one for each table.

They read the memory of the virtual GPU where the published program did. The networks are those of their packages;
layers and U-Net of the programs that need nothing but torch are written here.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import gc
import importlib.util
import itertools
import os
import pathlib
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import torch
from torch import nn

GIB = 2**30
Run = Callable[[nn.Module, Sequence[int]], list[int]]
"""From the network, on the CPU, and batch sizes to the bytes that the program printed for each."""


class Program(NamedTuple):
    """What runs for the rows of a table: the package that it needs beside torch, its network, what is done with it."""

    package: str
    build: Callable[[], nn.Module]
    run: Run


INSTALL = {
    "torchvision": "pip install torchvision",
    "yolov5": "git clone --branch v7.0 https://github.com/ultralytics/yolov5 FOLDER/yolov5",
    "ultralytics-8.0.166": "pip install --no-deps --target FOLDER/ultralytics-8.0.166 ultralytics==8.0.166",
    "ultralytics-8.4.116": "pip install --no-deps --target FOLDER/ultralytics-8.4.116 ultralytics==8.4.116",
}
"""Package -> the command that brings it. FOLDER holds those that exclude each other."""
_MODULES = {
    "yolov5": ("models", "utils"),
    "ultralytics-8.0.166": ("ultralytics",),
    "ultralytics-8.4.116": ("ultralytics",),
}


def is_installed(package: str, folder: pathlib.Path) -> bool:
    """Return whether a program's package can be imported."""
    if package in _MODULES:
        return (folder / package).is_dir()
    return not package or importlib.util.find_spec(package) is not None


@contextlib.contextmanager
def importable(package: str, folder: pathlib.Path) -> Iterator[None]:
    """Import a package from its own folder, and forget it afterwards, so that another release can be imported.

    The packages are told not to install others, not to print, and not to write into the home directory.
    """
    if package not in _MODULES:
        yield
        return
    with tempfile.TemporaryDirectory() as settings:
        os.environ.update(
            YOLO_CONFIG_DIR=settings, YOLO_AUTOINSTALL="false", YOLO_VERBOSE="false", YOLOv5_VERBOSE="false"
        )
        sys.path.insert(0, str(folder / package))
        try:
            yield
        finally:
            sys.path.remove(str(folder / package))
            for name in [each for each in sys.modules if each.split(".")[0] in _MODULES[package]]:
                del sys.modules[name]


# --- Ultralytics' AutoBatch ---


class State(NamedTuple):
    """GiB that the program prints before its table, with two copies of the network: allocated and reserved."""

    allocated: float
    reserved: float

    def restore(self) -> torch.Tensor:
        """Bring a GPU that has one copy of the network into the state before the second one was made.

        One block stands for all else that is allocated, and one for the cache that earlier work left: the second copy
        goes into it.
        """
        weights = torch.cuda.memory_allocated()
        other = _nothing(int(self.allocated * GIB) - 2 * weights)
        _nothing(int(self.reserved * GIB) - torch.cuda.memory_reserved())
        return other


def _nothing(size: int) -> torch.Tensor:
    return torch.empty(max(size, 0), dtype=torch.uint8, device="cuda")


def autobatch(
    model: nn.Module, sizes: Sequence[int], *, side: int, state: State, counts_operations: bool = True
) -> list[int]:
    """Do what AutoBatch did up to 2023: three passes of each size, one size after the other, under one autocast.

    Before them `thop` counts operations in a pass without gradients. In it autocast keeps 16-bit copies of the weights
    that no gradient leads through, so the later passes compute none for the weights of convolutions.
    """
    reserved = []
    original = model.cuda()
    other = state.restore()
    with torch.autocast("cuda"):
        model = copy.deepcopy(original).train()
        for size in sizes:
            images = torch.zeros(size, 3, side, side).cuda().requires_grad_()
            if counts_operations:
                _count_operations(model, images)
            for _ in range(3):
                outputs = model(images)
                if isinstance(outputs, list):  # else the program fails at the sum and goes on without backward
                    sum(each.sum() for each in outputs).backward()
            reserved.append(torch.cuda.memory_reserved())
            torch.cuda.empty_cache()
    del original, other
    return reserved


def _count_operations(model: nn.Module, images: torch.Tensor) -> None:
    with torch.no_grad():
        model.eval()(images)
    model.train()


def autobatch_with_loss(
    model: nn.Module, sizes: Sequence[int], *, side: int, state: State, scratch: Callable[[int], int]
) -> list[int]:
    """Do what AutoBatch does from 2025 on: it prints the sum of two readings, after a pass forward and after `scratch`.

    `scratch` gives the bytes for a batch size that stand for those of the loss. The cache is emptied before each.
    """
    printed = []
    original = model.cuda()
    other = state.restore()
    with torch.autocast("cuda"):
        model = copy.deepcopy(original).train()
        gc.collect()
        torch.cuda.empty_cache()
        for size in sizes:
            images = torch.zeros(size, 3, side, side).cuda().requires_grad_()
            _count_operations(copy.deepcopy(model), images)
            torch.cuda.empty_cache()
            outputs = model(images)
            forward = torch.cuda.memory_reserved()
            torch.cuda.empty_cache()
            _nothing(scratch(size))
            printed.append(forward + torch.cuda.memory_reserved())
            gc.collect()
            torch.cuda.empty_cache()
    del original, other, outputs
    return printed


OBJECTS = 100
"""Objects of the fullest image times four, which the sources do not print; ten more are 0.1 to 0.5 % of a row."""


def _anchors(side: int) -> int:
    return sum((side // stride) ** 2 for stride in (8, 16, 32))


def _scratch(size: int, *, side: int) -> int:
    """Return the bytes of a float32 for each object and anchor, up to release 8.4.41."""
    return 4 * size * OBJECTS * _anchors(side)


def _large_scratch(size: int, *, side: int, classes: int) -> int:
    """Return the bytes of six float32 for each object and anchor, and for each class and anchor, from 8.4.95 on."""
    return 4 * size * 6 * (OBJECTS + classes) * _anchors(side)


def _yolov5(name: str, classes: int) -> nn.Module:
    models = importlib.import_module("models.yolo")
    return models.Model(pathlib.Path(str(models.__file__)).with_name(f"{name}.yaml"), nc=classes)


def _yolo(name: str, classes: int) -> nn.Module:
    tasks = importlib.import_module("ultralytics.nn.tasks")
    kind = tasks.SegmentationModel if name.endswith("-seg") else tasks.DetectionModel
    return kind(f"{name}.yaml", nc=classes, verbose=False)


# --- YOLOv5's profile of single layers ---


class Convolution(nn.Sequential):
    """A convolution with batch norm and SiLU."""

    def __init__(self, inputs: int, outputs: int, window: int, stride: int = 1, padding: int | None = None):
        padding = window // 2 if padding is None else padding
        super().__init__(
            nn.Conv2d(inputs, outputs, window, stride, padding, bias=False), nn.BatchNorm2d(outputs), nn.SiLU()
        )


class Focus(nn.Module):
    """A convolution of the four quarters of an image, each of every second row and column."""

    def __init__(self, inputs: int, outputs: int, window: int):
        super().__init__()
        self.convolution = Convolution(4 * inputs, outputs, window)

    def forward(self, image: torch.Tensor) -> torch.Tensor:
        """Return the convolution of the quarters."""
        quarters = [image[..., row::2, column::2] for column in (0, 1) for row in (0, 1)]
        return self.convolution(torch.cat(quarters, 1))


class Bottleneck(nn.Module):
    """Two convolutions, of half the channels between them, beside which the input passes."""

    def __init__(self, channels: int):
        super().__init__()
        self.narrow = Convolution(channels, channels // 2, 1)
        self.wide = Convolution(channels // 2, channels, 3)

    def forward(self, image: torch.Tensor) -> torch.Tensor:
        """Return the sum of input and convolutions."""
        return image + self.wide(self.narrow(image))


def _focus_and_stem() -> nn.Module:
    return nn.ModuleList(
        [Focus(3, 64, 3), nn.Sequential(Convolution(3, 32, 3), Convolution(32, 64, 3, 2), Bottleneck(64))]
    )


def _focus_and_convolution() -> nn.Module:
    """Return the modules of yolov5's issue 4825: both twice, in evaluation mode, with one batch norm for both."""
    focus, convolution = Focus(3, 64, 3), Convolution(3, 64, 6, 2, 2)
    convolution[1] = focus.convolution[1]
    modules = nn.ModuleList([focus, convolution]).eval()
    return nn.ModuleList([*modules, *modules])


def profile(modules: nn.Module, sizes: Sequence[int]) -> list[int]:
    """Run ten passes of each module, one module after the other; outputs of one live until the next has run once."""
    reserved = []
    images = torch.randn(sizes[0], 3, 640, 640).cuda().requires_grad_()
    assert isinstance(modules, nn.ModuleList)
    for module in modules:
        module.cuda()
        for _ in range(10):
            outputs = module(images)
            outputs.sum().backward()
        reserved.append(torch.cuda.memory_reserved())
        torch.cuda.empty_cache()
    return reserved


# --- torchgpipe's U-Net ---


class UNet(nn.Module):
    """A U-Net of cells of convolutions, dropout, instance norm and leaky ReLU, built from the inside out."""

    def __init__(self, channels: Sequence[int], convolutions: int, inputs: int):
        super().__init__()
        first, *rest = channels
        self.encode = _cell(inputs, first, first, convolutions)
        inner = UNet(rest, convolutions, first) if rest else _cell(first, 2 * first, first, convolutions)
        self.inside = nn.Sequential(nn.MaxPool2d(2), inner, nn.Upsample(scale_factor=2))
        self.decode = _cell(2 * first, first // 2, first // 2, convolutions)

    def forward(self, image: torch.Tensor) -> torch.Tensor:
        """Return the image after encoding, the inner U-Net and decoding."""
        encoded = self.encode(image)
        return self.decode(torch.cat([self.inside(encoded), encoded], 1))


def _cell(inputs: int, middle: int, outputs: int, convolutions: int) -> nn.Module:
    channels = [inputs, *[middle] * (convolutions - 1), outputs]
    layers = [
        nn.Sequential(
            nn.Conv2d(before, after, 3, padding=1, bias=False),
            nn.Dropout2d(0.1),
            nn.InstanceNorm2d(after),
            nn.LeakyReLU(),
        )
        for before, after in itertools.pairwise(channels)
    ]
    return nn.Sequential(*layers)


def _unet() -> nn.Module:
    return nn.Sequential(UNet([72 * 2**level for level in range(5)], 6, 3), nn.Conv2d(36, 1, 1, bias=False))


def two_steps(model: nn.Module, sizes: Sequence[int]) -> list[int]:
    """Run two training steps with SGD whose gradients add up, as torchgpipe's benchmark of memory does."""
    (size,) = sizes
    model = model.cuda()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    images, target = torch.rand(size, 3, 192, 192).cuda(), torch.rand(size, 1, 192, 192).cuda()
    for _ in range(2):
        outputs = model(images)
        nn.functional.binary_cross_entropy_with_logits(outputs, target).backward()
        optimizer.step()
    return [torch.cuda.max_memory_reserved()]


# --- torchvision's networks ---


def _torchvision(name: str) -> nn.Module:
    return getattr(importlib.import_module("torchvision.models"), name)(weights=None)


def _mobilenet_in_a_row() -> nn.Module:
    """Return MobileNet V2 as a sequence, as MONeT has it."""
    model = _torchvision("mobilenet_v2")
    dropout, linear = model.get_submodule("classifier").children()
    return nn.Sequential(model.get_submodule("features"), nn.AdaptiveAvgPool2d((1, 1)), nn.Flatten(), dropout, linear)


def sums(model: nn.Module, sizes: Sequence[int]) -> list[int]:
    """Run three passes whose gradients add up, as MONeT's measurement of PyTorch does, with cuDNN's benchmark."""
    (size,) = sizes
    torch.backends.cudnn.benchmark = True
    model = model.cuda()
    images = torch.randn(size, 3, 224, 224).cuda()
    torch.cuda.reset_peak_memory_stats()
    for _ in range(3):
        outputs = model(images)
        if isinstance(outputs, tuple):  # GoogLeNet's, with those of its two auxiliary classifiers
            outputs = outputs[0] + outputs[1] + outputs[2]
        outputs.sum().backward()
        del outputs
    return [torch.cuda.max_memory_allocated()]


def above_weights(model: nn.Module, sizes: Sequence[int]) -> list[int]:
    """Return the peak of five passes above the weights, as ColossalAI's solvers are compared with PyTorch."""
    (size,) = sizes
    model = model.train().cuda()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    weights, criterion = torch.cuda.max_memory_allocated(), nn.CrossEntropyLoss()
    for _ in range(5):
        images = torch.rand(size, 3, 224, 224, device="cuda")
        labels = torch.randint(1000, (size,), device="cuda")
        criterion(model(images), labels).backward()
        model.zero_grad()
    return [torch.cuda.max_memory_allocated() - weights]


def _retinanet() -> nn.Module:
    """Return the RetinaNet of MLPerf: ResNeXt-50 with three trainable layers, 264 classes."""
    detection = importlib.import_module("torchvision.models.detection")
    pyramid = importlib.import_module("torchvision.ops.feature_pyramid_network")
    backbone = detection.backbone_utils.resnet_fpn_backbone(
        backbone_name="resnext50_32x4d",
        weights=None,
        trainable_layers=3,
        returned_layers=[2, 3, 4],
        extra_blocks=pyramid.LastLevelP6P7(256, 256),
    )
    return detection.RetinaNet(backbone, 264, min_size=800, max_size=800)


def detection_steps(model: nn.Module, sizes: Sequence[int]) -> list[int]:
    """Train with Adam, autocast to float16 and channels_last; return the peak after the first step and the second."""
    model = model.cuda().to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    optimizer = torch.optim.Adam([each for each in model.parameters() if each.requires_grad], lr=1e-4)
    scaler, peaks = torch.amp.GradScaler("cuda"), []
    for size in sizes:
        images = [torch.rand(3, 800, 800).cuda() for _ in range(size)]
        boxes = torch.tensor([[10.0, 10.0, 100.0, 100.0]] * 7).cuda()
        targets = [{"boxes": boxes, "labels": torch.ones(7, dtype=torch.long).cuda()} for _ in images]
        with torch.autocast("cuda"):
            loss = sum(model(images, targets).values())
        optimizer.zero_grad()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        peaks.append(torch.cuda.max_memory_allocated())
    return peaks


def _table(
    package: str, name: str, classes: int, side: int, state: State, *, counts_operations: bool = True
) -> Program:
    network = _yolov5 if package == "yolov5" else _yolo
    run = functools.partial(autobatch, side=side, state=state, counts_operations=counts_operations)
    return Program(package, functools.partial(network, name, classes), run)


def _table_with_loss(name: str, classes: int, side: int, state: State, scratch: Callable[[int], int]) -> Program:
    run = functools.partial(autobatch_with_loss, side=side, state=state, scratch=scratch)
    return Program("ultralytics-8.4.116", functools.partial(_yolo, name, classes), run)


def _with_torchvision(name: str, run: Run) -> Program:
    return Program("torchvision", functools.partial(_torchvision, name), run)


_OLD = "ultralytics-8.0.166"
_FOOTBALL = _table_with_loss(
    "yolo26s", 4, 960, State(0.12, 0.14), functools.partial(_large_scratch, side=960, classes=4)
)
_SIGNS = functools.partial(_scratch, side=640)
PROGRAMS: dict[str, Program] = {
    "layers-t4": Program("", _focus_and_stem, profile),
    "layers-v100": Program("", _focus_and_convolution, profile),
    "unet-p40": Program("", _unet, two_steps),
    "yolov5s-a100": _table("yolov5", "yolov5s", 80, 640, State(0.0813, 0.0996)),
    "yolov5n-3070": _table("yolov5", "yolov5n", 4, 416, State(0.01, 0.04)),
    "yolov5m-3070": _table("yolov5", "yolov5m", 4, 416, State(0.16, 0.24)),
    "yolov8s-t4": _table(_OLD, "yolov8s", 10, 640, State(0.12, 0.25), counts_operations=False),
    "yolov8n-4090": _table(_OLD, "yolov8n", 1, 480, State(0.05, 0.22)),
    "yolov8n-1080ti": _table(_OLD, "yolov8n", 20, 640, State(0.07, 0.10)),
    "yolov8l-seg-a100": _table(_OLD, "yolov8l-seg", 24, 640, State(0.36, 0.37)),
    "yolo26s-t4-a": _FOOTBALL,
    "yolo26s-t4-b": _FOOTBALL,
    "yolo11s-seg-l4": _table_with_loss(
        "yolo11s-seg", 2, 640, State(0.12, 0.14), functools.partial(_large_scratch, side=640, classes=2)
    ),
    "yolo11n-4070": _table_with_loss("yolo11n", 55, 640, State(0.06, 0.29), _SIGNS),
    "yolov8n-4070": _table_with_loss("yolov8n", 55, 640, State(0.06, 0.30), _SIGNS),
    "monet-resnet50": _with_torchvision("resnet50", sums),
    "monet-googlenet": _with_torchvision("googlenet", sums),
    "monet-mobilenet_v2": Program("torchvision", _mobilenet_in_a_row, sums),
    "monet-vgg16": _with_torchvision("vgg16", sums),
    "colossalai-resnet18": _with_torchvision("resnet18", above_weights),
    "colossalai-resnet152": _with_torchvision("resnet152", above_weights),
    "colossalai-densenet121-a": _with_torchvision("densenet121", above_weights),
    "colossalai-densenet121-b": _with_torchvision("densenet121", above_weights),
    "retinanet-h100": Program("torchvision", _retinanet, detection_steps),
}
"""Table of the file -> its program."""
