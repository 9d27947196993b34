"""The rows of published_peaks.csv, each with what the virtual GPU says about it."""

import csv
import functools
import gc
import json
import pathlib
from collections.abc import Callable, Iterator
from typing import NamedTuple

import numpy as np
import torch

from memexplore import capture
from tests.fidelity import models, operations

PUBLISHED = pathlib.Path(__file__).parents[3] / "shared" / "published_peaks.csv"
RECORDINGS = PUBLISHED.parent / "recordings"
MIB, GIB = 1024**2, 1024**3

# The GPU of the catalogue that a row was measured on; where the source does not say, one of its class.
GPUS = {
    "RTX PRO 6000 Blackwell 94.97GiB": "RTX PRO 6000",
    "RTX 4090 23.52GiB": "RTX 4090",
    "not stated (80GB class)": "A100 80GB",
}
# The torch release of the op rows is not stated; the benchmark's 0.2.1 came with 2.4, its 0.6.0 with 2.7.
RELEASES = {"version 0.2.1": "2.4", "version 0.6.0": "2.7"}

CAUSES: dict[str, str] = {}
"""Row -> why it is not reproduced, measured."""


class Case(NamedTuple):
    """One row: `measured` as it was printed, `run` gives the bytes (or raises OutOfMemoryError)."""

    name: str
    gpu: str
    torch: str
    measured: str
    unit: str
    run: Callable[[], float]

    def predicted(self) -> str:
        """What the virtual GPU says, printed as the row is."""
        try:
            with capture.virtual(self.gpu, torch=self.torch):
                size = self.run()
        except torch.OutOfMemoryError:
            return "OOM"
        finally:
            gc.collect()
        if self.measured == "OOM":
            return f"{size / GIB:.2f}"
        return printed(size, self.measured, self.unit)


def printed(size: float, like: str, unit: str) -> str:
    """A size in bytes as a row prints it: GiB and MiB with its digits, MB as the benchmark keeps it.

    >>> printed(25.3525 * GIB, "25.35", "GiB"), printed(2072.62548828125 * MIB, "2072.63", "MiB")
    ('25.35', '2072.63')
    >>> printed(20480.1259765625 * MIB, "20480.125", "MB")
    '20480.125'
    """
    if unit == "GiB":
        # The table drops the zero of 21.30.
        return f"{float(f'{size / GIB:.2f}'):g}"
    if unit == "MiB":
        return f"{size / MIB:.6g}"
    # The benchmark collects its peaks in a tensor of 32-bit floats and writes them as Python writes floats.
    return str(float(np.float32(size / MIB)))


def published() -> Iterator[Case]:
    """The rows of the lm-xl, naive-attention and op groups."""
    with PUBLISHED.open(newline="") as file:
        for row in csv.DictReader(file):
            if row["group"] == "lm-xl":
                yield _language_model(row)
            elif row["group"] == "naive-attention":
                yield _attention(row)
            elif row["group"].startswith("op "):
                yield _operation(row)


def _case(row: dict[str, str], name: str, release: str, run: Callable[[], float]) -> Case:
    gpu = GPUS.get(row["gpu"], row["gpu"])
    return Case(name, gpu, release, row["value"], row["unit"], run)


def _language_model(row: dict[str, str]) -> Case:
    dtype = torch.bfloat16 if "bf16" in row["dtype"] else None
    forward = row["config"].startswith("forward")
    kind = "forward" if forward else "step"
    name = f"lm-xl {kind} {'bf16' if dtype else 'fp32'} seq {row['seq']} on {GPUS[row['gpu']]}"
    function = models.lm_forward if forward else models.lm_step
    return _case(row, name, "2.11", functools.partial(function, int(row["seq"]), dtype, int(row["batch"])))


def _attention(row: dict[str, str]) -> Case:
    width = int(row["model"].rpartition("=")[2])
    metric = row["metric"]
    name = f"naive-attention d={width} seq {row['seq']} {metric}"
    return _case(row, name, "2.6", lambda: models.naive_attention(int(row["seq"]), width)[metric])


def _operation(row: dict[str, str]) -> Case:
    operation = row["group"].removeprefix("op ")
    arguments = json.loads(row["config"].partition(" ")[2])
    arguments = {name: value for name, value in arguments.items() if name not in ("dtype", "hidden_act")}
    axis, _, value = row["seq"].partition("=")
    arguments[axis] = int(value)
    release = next(release for text, release in RELEASES.items() if text in row["source"])
    run = functools.partial(getattr(operations, operation), **arguments)
    return _case(row, f"op {operation} {row['seq']} on {row['gpu'].removeprefix('NVIDIA ')}", release, run)


def table() -> str:
    """All rows as a Markdown table: case, predicted, measured, difference."""
    lines = ["| case | torch | predicted | measured | difference |", "|---|---|---|---|---|"]
    for case in published():
        predicted = case.predicted()
        if predicted == case.measured:
            difference = "same" if predicted == "OOM" else "0"
        else:
            difference = CAUSES.get(case.name, "not explained")
            if "OOM" not in (predicted, case.measured):
                difference = f"{float(predicted) - float(case.measured):+g} {case.unit}: {difference}"
        unit = "" if case.measured == "OOM" else f" {case.unit}"
        lines.append(f"| {case.name} | {case.torch} | {predicted}{unit} | {case.measured}{unit} | {difference} |")
    return "\n".join(lines)
