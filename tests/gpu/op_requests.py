"""Requests of single ops, forward and backward, on a real or a virtual GPU: cases of ordinary size, and the database's.

`python -m tests.gpu.op_requests OUT.json.gz` measures them on a machine with an NVIDIA GPU (five minutes). A part is
one op with its inputs, `|f` forward or `|b` backward; its requests are the bytes that the allocator was asked for.
tests/data/op_requests_*.json.gz holds a sample of the parts of an H100.
"""

from __future__ import annotations

import gzip
import itertools
import json
import pathlib
import sys
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch.utils._pytree import tree_leaves, tree_map

from tests.gpu.more_op_cases import cases
from tests.virtual_gpu import every_op

FILE = pathlib.Path(__file__).parent.parent / "data" / "op_requests_nvidia_h100_80gb_hbm3_torch_2.11.0.json.gz"
MARK = 900_000_001
"""Bytes of the first request that marks the beginning of a part; the next one has a byte more."""
_SAMPLES = {torch.float32: 6, torch.bfloat16: 2}


class Marks:
    """Names of the parts, each begun by a request of its own size."""

    def __init__(self) -> None:
        self.names: list[str] = []

    def begin(self, name: str = "") -> None:
        """Begin a part; one without a name is not counted."""
        mark = torch.empty(MARK + len(self.names), dtype=torch.uint8, device="cuda")
        del mark
        self.names.append(name)

    def parts(self, sizes: list[int]) -> dict[str, list[int]]:
        """Return the requests of each part, of the bytes of all allocations in order."""
        found: dict[str, list[int]] = {}
        name = ""
        for size in sizes:
            number = size - MARK
            if 0 <= number < len(self.names):
                name = self.names[number]
                if name:
                    found[name] = []
            elif name:
                found[name].append(size)
        return found


def _tensors(value: Any) -> list[torch.Tensor]:
    return [leaf for leaf in tree_leaves(value) if isinstance(leaf, torch.Tensor)]


def _backward(marks: Marks, name: str, outputs: list[torch.Tensor], inputs: list[torch.Tensor]) -> None:
    gradients = [torch.ones_like(each) for each in outputs]
    marks.begin(name)
    results = torch.autograd.grad(outputs, inputs, gradients, allow_unused=True)
    marks.begin()
    del results


def _case(marks: Marks, name: str) -> None:
    function, makers = cases[name]
    args = [make("cuda") for make in makers]
    marks.begin(f"{name}|f")
    result = function(*args)
    marks.begin()
    result = result if isinstance(result, torch.Tensor) else result[0]
    inputs = [each for each in args if each.requires_grad]
    if inputs and result.requires_grad:
        _backward(marks, f"{name}|b", [result], inputs)


def _sample(marks: Marks, op: Any, name: str, sample: Any) -> None:
    args = tree_map(lambda value: every_op._on(value, "cuda"), (sample.input, sample.args, sample.kwargs))
    if "device" in args[2]:
        args[2]["device"] = "cuda"
    name += f" {[list(each.shape) for each in _tensors(args)]}"
    marks.begin(f"{name}|f")
    result = op(args[0], *args[1], **args[2])
    marks.begin()
    outputs = [each for each in _tensors(sample.output_process_fn_grad(result)) if each.requires_grad]
    outputs = [each for each in outputs if not each.dtype.is_complex]
    inputs = [each for each in _tensors(args) if each.requires_grad]
    if inputs and outputs:
        _backward(marks, f"{name}|b", outputs, inputs)


def _op(marks: Marks, op: Any, chosen: Callable[[str], bool]) -> None:
    for dtype in [dtype for dtype in _SAMPLES if dtype in op.dtypes]:
        names = [f"{op.name}.{op.variant_test_name} {str(dtype)[6:]} {number}" for number in range(_SAMPLES[dtype])]
        last = max((number for number, name in enumerate(names) if chosen(name)), default=-1)
        torch.manual_seed(0)
        samples = op.sample_inputs("cpu", dtype, requires_grad=op.supports_autograd) if last >= 0 else ()
        for number, sample in enumerate(itertools.islice(samples, last + 1)):
            name = names[number]
            if not chosen(name):
                continue
            torch.manual_seed(number)
            try:
                _sample(marks, op, name, sample)
            except Exception:  # some inputs are refused by CUDA too
                marks.begin()


def run(marks: Marks, chosen: Callable[[str], bool] = lambda name: True) -> None:
    """Run the cases and the ops of torch's database whose names (without shapes) are chosen."""
    warnings.simplefilter("ignore")
    square = torch.ones(64, 64, device="cuda")  # cuBLAS's workspaces come first
    torch.nn.functional.linear(square @ square, square.half().float(), square[0])
    for name in filter(chosen, sorted(cases)):
        torch.manual_seed(0)
        try:
            _case(marks, name)
        except Exception:
            marks.begin()
    for op in sorted(every_op.database(), key=lambda op: (op.name, op.variant_test_name)):
        _op(marks, op, chosen)


def read(path: pathlib.Path) -> dict[str, list[int]]:
    with gzip.open(path, "rt") as file:
        return json.load(file)


def main(path: str) -> None:
    torch.cuda.init()
    torch.cuda.memory._record_memory_history(enabled="all", context=None, stacks="python", max_entries=5_000_000)
    marks = Marks()
    run(marks)
    events = torch.cuda.memory._snapshot()["device_traces"][0]
    with gzip.open(path, "wt") as file:
        json.dump(marks.parts([event["size"] for event in events if event["action"] == "alloc"]), file)


if __name__ == "__main__":
    main(sys.argv[1])
