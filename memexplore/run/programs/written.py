"""What a training step or a cell says where no knob changes it."""

from __future__ import annotations

import re
from typing import Any

import torch
from torch import nn

from memexplore.run.knobs.control import Explored
from memexplore.run.knobs.knobs import Knobs
from memexplore.run.machine import Machine
from memexplore.run.programs import optimizers
from memexplore.run.programs.step import Step
from memexplore.run.programs.step_record import built_model
from memexplore.tape import Tape

_OTHER_COUNT = re.compile(r"batches|(^|_)(n|num|number|count|i|id|idx|index|micro)(_|$)")
"""Variables of a cell whose number is not the samples of a batch."""


def explored(step: Step, machine: Machine, tape: Tape) -> Explored:
    """Return what an explorer knows of a step; `tape` is the tape of its run as written."""
    return Explored(
        machine,
        built_model(step),
        _optimizer_of(step),
        batch=step.batch_size,
        input_size=step.input_size,
        are_images=step.size_dimensions.start > 1,
        tape=tape,
    )


def _optimizer_of(step: Step) -> torch.optim.Optimizer | None:
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
