"""Measure on a GPU what is an estimate elsewhere: `python -m tests.gpu.convolutions OUT.json [--minutes 10]`.

First what lies outside the allocator, under lazy and eager loading of kernels, after each library is touched. Then the
workspaces of cuDNN of those convolutions of which the assumptions of a prediction (tensor_core_convolutions) differ
most, until the time is over. The file has the format of tests/data/h100_cudnn.json.gz, and `outside` beside.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import pathlib
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch

from memexplore.recorder.driver_memory import DriverMemory
from memexplore.virtual_gpu.kernels.tensor_core_convolutions import Convolution, Pass, Precision, possible_workspaces

COUNT = 2_000
"""Convolutions to measure, three workspaces each."""
PRECISIONS = {"tf32": Precision.TF32, "bf16": Precision.BF16, "fp16": Precision.FP16}
_DTYPES = {"tf32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
_CHANNELS = (3, 16, 24, 32, 48, 64, 96, 100, 128, 192, 256, 320, 512, 728, 1024)
_WINDOWS = ((1, 1), (1, 2), (2, 2), (3, 1), (3, 2), (5, 1), (7, 2), (16, 16))
"""Side of the window, and stride."""
_IMAGES, _SIDES = (1, 2, 4, 8, 16, 32, 64, 128), (7, 14, 19, 28, 32, 37, 56, 64, 112, 128, 224, 256)
_EVERY = 17
"""Of all combinations, which are 700 000, only one in so many is looked at."""
_LARGEST = 1 << 30
"""Most bytes of an input or a result."""
_LIBRARIES = ("context", "cuBLAS", "cuDNN")


class Case(NamedTuple):
    """A convolution in two dimensions, padded so that the stride alone makes its result smaller."""

    images: int
    inputs: int
    outputs: int
    window: int
    stride: int
    side: int
    precision: str
    channels_last: bool

    @property
    def result(self) -> int:
        """Pixels of a side of the result."""
        return (self.side + 2 * self.padding - self.window) // self.stride + 1

    @property
    def padding(self) -> int:
        """Pixels around an image."""
        return (self.window - 1) // 2

    def convolution(self) -> Convolution:
        """Return the shapes."""
        return Convolution(
            (self.images, self.inputs, self.side, self.side),
            (self.outputs, self.inputs, self.window, self.window),
            (self.images, self.outputs, self.result, self.result),
            self.stride,
            PRECISIONS[self.precision],
            self.channels_last,
        )

    def row(self, workspaces: list[int]) -> list[Any]:
        """Return the row of the file: as in h100_cudnn.json.gz."""
        shape = [self.images, self.inputs, self.outputs, self.window, self.stride, self.side, self.result, 2]
        return [*shape, self.precision, self.channels_last, *workspaces]


def candidates() -> Iterator[Case]:
    """Yield convolutions of ordinary sizes."""
    layers = itertools.product(_IMAGES, _CHANNELS, _CHANNELS[1:], _WINDOWS, _SIDES, PRECISIONS, (False, True))
    for images, inputs, outputs, (window, stride), side, precision, last in itertools.islice(layers, 0, None, _EVERY):
        case = Case(images, inputs, outputs, window, stride, side, precision, last)
        if window <= side and case.convolution().largest * case.convolution().precision.itemsize <= _LARGEST:
            yield case


def chosen(capability: tuple[int, int], count: int = COUNT) -> list[Case]:
    """Return the convolutions of which the assumptions differ most, for their size, evenly over all kinds.

    >>> cases = chosen((9, 0), 12)
    >>> len(cases), len({(case.precision, case.channels_last) for case in cases})
    (12, 6)
    """
    kinds: dict[tuple[str, bool], list[tuple[float, Case]]] = {}
    for case in candidates():
        convolution = case.convolution()
        spread = max(_spread(possible_workspaces(convolution, of, capability)) for of in Pass)
        if spread:
            kinds.setdefault((case.precision, case.channels_last), []).append((spread / convolution.operands, case))
    share = count // len(kinds)
    return [case for kind in kinds.values() for case in _spaced(sorted(kind, reverse=True)[: 4 * share], share)]


def _spread(sizes: tuple[int, ...]) -> int:
    return max(sizes) - min(sizes)


def _spaced(ranked: list[tuple[float, Case]], count: int) -> list[Case]:
    """Return `count` of the cases, evenly spaced: neighbours differ in one number only."""
    step = max(len(ranked) // count, 1)
    return [case for _, case in ranked[::step][:count]]


def workspaces(case: Case) -> list[int]:
    """Return the bytes of the workspaces of the result and of both gradients, as the allocator saw them."""
    dtype, memory_format = _DTYPES[case.precision], torch.channels_last if case.channels_last else torch.preserve_format
    shapes = case.convolution()
    source = torch.zeros(shapes.source, dtype=dtype, device="cuda").contiguous(memory_format=memory_format)
    weight = torch.zeros(shapes.weight, dtype=dtype, device="cuda").contiguous(memory_format=memory_format)
    arguments = ([case.stride] * 2, [case.padding] * 2, [1, 1], False, [0, 0], 1)
    forward = torch.ops.aten.convolution
    gradient = torch.zeros_like(forward(source, weight, None, *arguments))

    def backward(mask: list[bool]) -> Any:
        return torch.ops.aten.convolution_backward(gradient, source, weight, None, *arguments, mask)

    return [
        _beside(lambda: forward(source, weight, None, *arguments)),
        _beside(lambda: backward([True, False, False])),
        _beside(lambda: backward([False, True, False])),
    ]


def _beside(run: Callable[[], Any]) -> int:
    """Return the bytes that an op requests at its peak beside what it returns."""
    run()  # what is made once per process
    torch.cuda.reset_peak_memory_stats()
    result = run()
    stats = torch.cuda.memory_stats()
    del result
    return stats["requested_bytes.all.peak"] - stats["requested_bytes.all.current"]


def outside() -> dict[str, int]:
    """Return the bytes outside the allocator of this process after each library is touched."""
    driver = DriverMemory(torch.device("cuda:0"))
    touch: dict[str, Callable[[], Any]] = {
        "context": lambda: torch.zeros(1, device="cuda"),
        "cuBLAS": lambda: torch.zeros(64, 64, device="cuda") @ torch.zeros(64, 64, device="cuda"),
        "cuDNN": lambda: torch.nn.functional.conv2d(
            torch.zeros(1, 8, 32, 32, device="cuda"), torch.zeros(8, 8, 3, 3, device="cuda")
        ),
    }
    found = {}
    for name in _LIBRARIES:
        touch[name]()
        torch.cuda.synchronize()
        found[name] = driver.outside().size
    return found


def _outside_when(loading: str) -> dict[str, int]:
    command = [sys.executable, "-m", "tests.gpu.convolutions", "--outside"]
    done = subprocess.run(
        command, env=os.environ | {"CUDA_MODULE_LOADING": loading}, capture_output=True, text=True, check=True
    )
    return json.loads(done.stdout.splitlines()[-1])


def measure(path: pathlib.Path, minutes: float) -> None:
    """Measure on the GPU of this machine and write the file after every hundred convolutions."""
    ends = time.monotonic() + 60 * minutes
    about: dict[str, Any] = {
        "gpu": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "cudnn": torch.backends.cudnn.version(),
        "outside": {loading: _outside_when(loading) for loading in ("LAZY", "EAGER")},
        "convolutions": [],
    }
    torch.backends.cudnn.allow_tf32 = True
    for number, case in enumerate(chosen(torch.cuda.get_device_capability())):
        if time.monotonic() > ends:
            break
        try:
            about["convolutions"].append(case.row(workspaces(case)))
        except torch.OutOfMemoryError:
            torch.cuda.empty_cache()
        if number % 100 == 99:
            path.write_text(json.dumps(about))
    path.write_text(json.dumps(about))


def main() -> None:
    """Measure, or say what is missing for that."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("path", nargs="?", type=pathlib.Path, default=pathlib.Path("convolutions.json"))
    parser.add_argument("--minutes", type=float, default=10)
    parser.add_argument("--outside", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if not torch.cuda.is_available():
        parser.exit(2, "This measures a GPU, and torch sees none.\n")
    if options.outside:
        print(json.dumps(outside()))
    else:
        measure(options.path, options.minutes)


if __name__ == "__main__":
    main()
