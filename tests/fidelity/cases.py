"""Cases of the fidelity table: the rows of published_peaks.csv, each a script and the value measured on a real GPU."""

import csv
import functools
import gc
import json
from collections.abc import Callable, Iterator
from typing import NamedTuple

import numpy as np
import torch

from memexplore.run.machine import virtual
from memexplore.tape import Os
from tests.data.kept import PUBLISHED_PEAKS
from tests.fidelity import formulas, models, operations, others

MIB, GIB = 1024**2, 1024**3

# From a row's GPU to its name in the catalogue; if the source does not state it, a GPU of its class.
GPUS = {
    "RTX PRO 6000 Blackwell 94.97GiB": "RTX PRO 6000",
    "RTX 4090 23.52GiB": "RTX 4090",
    "not stated (80GB class)": "A100 80GB",
}
# The torch release of the op rows is not stated; the benchmark's 0.2.1 came with 2.4, its 0.6.0 with 2.7.
RELEASES = {"version 0.2.1": "2.4", "version 0.6.0": "2.7"}

CAUSES: dict[str, str] = {}
"""Row -> measured cause of a difference."""


class Case(NamedTuple):
    """One row: `measured` as it was printed, `run` gives the bytes (or raises OutOfMemoryError)."""

    name: str
    gpu: str
    torch: str
    measured: str
    unit: str
    run: Callable[[], float]
    formula: Callable[[others.Subject], float | None]
    """The bytes that parameters and a formula give for the model that the script calls; None without a formula."""
    settings: str = ""
    short: Callable[[], float] | None = None
    """`run` with fewer warm-up steps, for tools that take half a minute a step."""
    os: Os = Os.LINUX

    def predicted(self) -> str:
        """Return the virtual GPU's answer, printed like the row."""
        try:
            with virtual(self.gpu, release=self.torch, settings=self.settings, os=self.os):
                size = self.run()
        except torch.OutOfMemoryError:
            return "OOM"
        finally:
            gc.collect()
        if self.measured == "OOM":
            return f"{size / GIB:.2f}"
        return printed(size, self.unit)


UNITS = {"GiB": GIB, "MiB": MIB, "MB": MIB, "B": 1}


def printed(size: float, unit: str) -> str:
    """Format a size in bytes as a row prints it: GiB and MiB with its digits, MB as the benchmark stores it.

    >>> printed(25.3525 * GIB, "GiB"), printed(2072.62548828125 * MIB, "MiB"), printed(27222108160, "B")
    ('25.35', '2072.63', '27222108160')
    >>> printed(20480.1259765625 * MIB, "MB")
    '20480.125'
    """
    if unit == "B":
        return str(int(size))
    if unit == "GiB":
        # The table drops the zero of 21.30.
        return f"{float(f'{size / GIB:.2f}'):g}"
    if unit == "MiB":
        return f"{size / MIB:.6g}"
    # The benchmark collects its peaks in a tensor of 32-bit floats and writes them as Python writes floats.
    return str(float(np.float32(size / MIB)))


def published() -> Iterator[Case]:
    """Yield the rows of the lm-xl, naive-attention and op groups."""
    with PUBLISHED_PEAKS.open(newline="") as file:
        for row in csv.DictReader(file):
            if row["group"] == "lm-xl":
                yield _language_model(row)
            elif row["group"] == "naive-attention":
                yield _attention(row)
            elif row["group"].startswith("op "):
                yield _operation(row)


def _case(row: dict[str, str], name: str, release: str, run: Callable[[], float], formula: Callable) -> Case:
    gpu = GPUS.get(row["gpu"], row["gpu"])
    return Case(name, gpu, release, row["value"], row["unit"], run, formula)


def _lm_formula(kind: str, context: int, dtype: torch.dtype | None, found: others.Subject) -> int:
    shape = formulas.Shape(4, context, 2560, 32, 32, 10_000, element=4 if dtype is None else 2)
    parameters = sum(parameter.numel() for parameter in found.module.parameters())
    whole = formulas.transformer_forward if kind == "forward" else formulas.transformer_step
    return whole(parameters, shape)


def _operation_formula(found: others.Subject) -> int:
    outputs, _ = others.outputs_of(found)
    return formulas.operation(found.module, found.inputs, outputs)


def _language_model(row: dict[str, str]) -> Case:
    dtype = torch.bfloat16 if "bf16" in row["dtype"] else None
    forward = row["config"].startswith("forward")
    kind = "forward" if forward else "step"
    name = f"lm-xl {kind} {'bf16' if dtype else 'fp32'} seq {row['seq']} on {GPUS[row['gpu']]}"
    function = models.lm_forward if forward else models.lm_step
    run = functools.partial(function, int(row["seq"]), dtype, int(row["batch"]))
    case = _case(row, name, "2.11", run, functools.partial(_lm_formula, kind, int(row["seq"]), dtype))
    return case._replace(short=functools.partial(run, warm_up=1))


def _attention(row: dict[str, str]) -> Case:
    width = int(row["model"].rpartition("=")[2])
    metric = row["metric"]
    name = f"naive-attention d={width} seq {row['seq']} {metric}"
    length = int(row["seq"])

    def run() -> float:
        return models.naive_attention(length, width)[metric]

    return _case(row, name, "2.6", run, lambda found: formulas.attention(8, length, width, metric))


def _operation(row: dict[str, str]) -> Case:
    operation = row["group"].removeprefix("op ")
    arguments = json.loads(row["config"].partition(" ")[2])
    arguments = {name: value for name, value in arguments.items() if name not in ("dtype", "hidden_act")}
    axis, _, value = row["seq"].partition("=")
    arguments[axis] = int(value)
    release = next(release for text, release in RELEASES.items() if text in row["source"])
    run = functools.partial(getattr(operations, operation), **arguments)
    name = f"op {operation} {row['seq']} on {row['gpu'].removeprefix('NVIDIA ')}"
    return _case(row, name, release, run, _operation_formula)
