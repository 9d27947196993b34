"""Find the names of a notebook that keep a cell's training on the CPU, and write advice into the tape.

An earlier cell that ran `device = "cuda" if torch.cuda.is_available() else "cpu"` with no GPU on has set them.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from memexplore.tape import Tape


def with_advice(tape: Tape, cell: str, names: Mapping[str, Any], gpu: str | None) -> Tape:
    """Return the tape, with a sentence on how to run the cell on the GPU if it did not use the GPU.

    `cell` is the source of the cell, `gpu` the GPU that the user named, if any.
    """
    from memexplore.analysis.verdict import Verdict, verdict

    if verdict(tape) is not Verdict.NOT_ON_GPU:
        return tape
    return tape.replace(meta=tape.meta._replace(advice=_advice(cell, names, gpu or tape.meta.gpu or "T4")))


def _advice(cell: str, names: Mapping[str, Any], gpu: str) -> str:
    from memexplore.run.machine import CPU, CUDA, default_name
    from memexplore.virtual_gpu.device import active

    used = dict.fromkeys(re.findall(r"[A-Za-z_]\w*", cell))
    # A cell that calls a function of an earlier cell does not name the device itself.
    device = next((name for name in [*used, *names] if _is_cpu_device(name, names.get(name))), None)
    model = next((name for name in used if _is_cpu_model(names.get(name))), None)
    if device is not None and re.search(rf"^\s*{device}\s*=", cell, re.MULTILINE):
        return f'{device} is "cpu" in this cell: write {device} = "cuda"'
    first = f"{device} is the CPU" if device is not None else f"{model} is on the CPU" if model is not None else ""
    if active() is not None:
        reason, cure = f", set before the virtual {active().gpu.name} was on", "run the cells above again"  # type: ignore[union-attr]
    elif gpu in (CPU, CUDA) or default_name() == CUDA:
        reason, cure = "", 'put the model and its batches on "cuda"'
    else:
        reason = ", set by a cell that ran before the virtual GPU was on"
        cure = f"write %memgpu {gpu} in the first cell, and run all cells again"
    if not first:
        return f'Put the model and its batches on "cuda". If earlier cells chose the CPU, {cure}'
    return f"{first}{reason}: {cure}"


def _is_cpu_device(name: str, value: Any) -> bool:
    import torch

    if isinstance(value, torch.device):
        return value.type == "cpu"
    # An array of the same name compares element by element.
    return "dev" in name.lower() and isinstance(value, str) and value == "cpu"


def _is_cpu_model(value: Any) -> bool:
    import torch

    if not isinstance(value, torch.nn.Module):
        return False
    devices = {parameter.device.type for parameter in value.parameters()}
    return devices == {"cpu"}
