"""What a training step says where a knob changes nothing: the values behind "as written", as short texts.

In: a step, its model and the tape of its run as written. Out: a text for each field of `Knobs`, empty if unknown.
"""

from __future__ import annotations

import re
from typing import Any

import torch
from torch import nn

from memexplore.analysis.levers import recomputes
from memexplore.knobs.knobs import Knobs
from memexplore.steps import optimizers
from memexplore.steps.step import Step
from memexplore.tape import Phase, Tape

_DTYPES = {torch.float32: "fp32", torch.float16: "fp16", torch.bfloat16: "bf16", torch.float64: "fp64"}
_OTHER_COUNT = re.compile(r"batches|(^|_)(n|num|number|count|i|id|idx|index|micro)(_|$)")
"""Variables of a cell with another number than that of the samples of a batch."""


def written_texts(step: Step, model: nn.Module, tape: Tape) -> dict[str, str]:
    """Return a text for each field of `Knobs` that has one, by name."""
    optimizer = written_optimizer(step)
    texts = {
        "batch": str(step.batch_size),
        "accumulation": "1",
        "input_size": str(step.input_size or ""),
        "precision": precision_text(model, tape),
        "inplace": inplace_text(model),
        "checkpoint": checkpoint_text(tape),
        "optimizer": "" if optimizer is None else optimizer_text(optimizer),
        "update": "" if optimizer is None else update_text(optimizer, tape.meta.device),
        "zero_grad": "to None",
    }
    return {field: text for field, text in texts.items() if text}


def precision_text(model: nn.Module, tape: Tape) -> str:
    """Return the data type of the weights; with the word "weights" where the forward pass casts, as autocast does."""
    kinds = dict.fromkeys(weight.dtype for weight in model.parameters() if weight.is_floating_point())
    if not kinds:
        return ""
    text = " and ".join(_DTYPES.get(kind, str(kind).removeprefix("torch.")) for kind in kinds)
    casts = tape.ops.index("aten::_to_copy") if "aten::_to_copy" in tape.ops else -1
    is_cast = casts >= 0 and bool(((tape.op == casts) & (tape.phase == Phase.FORWARD)).any())
    return f"{text} weights" if is_cast else text


def inplace_text(model: nn.Module) -> str:
    """Return whether the activations of a model overwrite their input.

    >>> inplace_text(nn.Sequential(nn.ReLU(inplace=True), nn.ReLU()))
    '1 of 2 on'
    """
    flags = [bool(module.inplace) for module in model.modules() if isinstance(getattr(module, "inplace", None), bool)]
    if not any(flags):
        return "off"
    return "on" if all(flags) else f"{sum(flags)} of {len(flags)} on"


def checkpoint_text(tape: Tape) -> str:
    """Return whether a run recomputes activations in its backward pass."""
    return "as in the model" if recomputes(tape) else "none"


def optimizer_text(optimizer: torch.optim.Optimizer) -> str:
    """Return the class of an optimizer.

    >>> optimizer_text(torch.optim.SGD([torch.zeros(1)], lr=1, momentum=0.9))
    'SGD with momentum'
    """
    name = type(optimizer).__name__
    return f"{name} with momentum" if name == "SGD" and optimizer.defaults.get("momentum") else name


def update_text(optimizer: torch.optim.Optimizer, device: str = "") -> str:
    """Return the implementation of the update of an optimizer of torch, empty for those of other libraries.

    `device` is ``cpu`` or the name of a GPU; the default of torch is "per tensor" on the CPU.

    Source of the default: `torch.optim.optimizer._default_to_fused_or_foreach`; Adafactor and optimizers without the
    argument `foreach` iterate over the parameters.

    >>> update_text(torch.optim.AdamW([torch.zeros(1)])), update_text(torch.optim.AdamW([torch.zeros(1)], fused=True))
    ('foreach', 'fused')
    """
    if not type(optimizer).__module__.startswith("torch.optim"):
        return ""
    defaults = optimizer.defaults
    if defaults.get("fused"):
        return "fused"
    foreach = defaults.get("foreach")
    if foreach is None and "foreach" in defaults:
        foreach = device != "cpu" and not isinstance(optimizer, torch.optim.Adafactor)
    return "foreach" if foreach else "per tensor"


def written_optimizer(step: Step) -> torch.optim.Optimizer | None:
    """Return the step's optimizer with a weight of its own, None if it cannot be made of one."""
    if isinstance(step.optimizer, torch.optim.Optimizer):
        return step.optimizer
    try:
        return optimizers.make(step.optimizer, Knobs(), [nn.Parameter(torch.zeros(1))])
    except Exception:  # a function that looks for certain weights
        return None


def assigned_batch(assigned: dict[str, Any]) -> tuple[str, int] | None:
    """Return the variable of a cell that seems to be its batch size, with its value.

    >>> assigned_batch({"rate": 0.1, "num_batches": 100, "batch_size": 8})
    ('batch_size', 8)
    """
    for name, value in assigned.items():
        if type(value) is int and "batch" in name.lower() and not _OTHER_COUNT.search(name.lower()):
            return name, value
    return None
