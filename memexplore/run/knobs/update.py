"""The knob `update`: how the optimizer goes over the parameters."""

from __future__ import annotations

import enum
import inspect
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any

import torch

from memexplore.run.knobs.applying.loop import Loop
from memexplore.run.knobs.control import Explored
from memexplore.run.knobs.knob import Estimate, Group, Knob, Limits, Stage, Untouched
from memexplore.run.knobs.mode import Mode
from memexplore.run.knobs.optimizer import KINDS
from memexplore.run.knobs.precision import Precision
from memexplore.run.knobs.values import OneOf
from memexplore.run.knobs.zero_grad import ZeroGrad

if TYPE_CHECKING:
    from memexplore.hardware.catalogue import Gpu
    from memexplore.run.knobs.knobs import Knobs


class Update(enum.Enum):
    """Iteration of the optimizer over the parameters."""

    AS_WRITTEN = "as written"
    FOREACH = "foreach"
    FUSED = "fused"
    PER_TENSOR = "per tensor"
    IN_BACKWARD = "in backward"


UPDATE_SETTINGS = {
    Update.FOREACH: {"foreach": True, "fused": False},
    Update.FUSED: {"fused": True, "foreach": False},
    Update.PER_TENSOR: {"foreach": False, "fused": False},
}
"""Arguments of torch's optimizers for each implementation of the update."""


class UpdateKnob(Knob):
    """How the optimizer goes over the parameters: all at once, one by one, or each in the backward pass."""

    name = "update"
    costs = "equal results, slower where it goes over one tensor at a time"
    values = OneOf(Update)
    place = 70
    group = Group.OPTIMIZER
    saves_little = True
    locked = "The optimizer was made with its implementation of the update: make another one and start again."
    stage = Stage.UPDATE
    adds_only_recomputation = True

    def phrase(self, value: Any) -> str:
        """Return the implementation."""
        return "optimizer step in backward" if value is Update.IN_BACKWARD else f"{value.value} update"

    def change_loop(self, value: Any, loop: Loop) -> None:
        """Update in the backward pass; `programs.optimizers` makes optimizers of the other implementations."""
        loop.updates_in_backward = value is Update.IN_BACKWARD

    def conflicts(self, value: Any, knobs: Knobs, explored: Explored) -> Iterator[str]:
        """Yield sentences for what needs gradients after the backward pass, and for a missing implementation."""
        if value is Update.IN_BACKWARD and (knobs.gpus or 1) > 1:
            yield (
                "update in backward runs before the gradients of the GPUs are added: write another update, or gpus=1"
            )
        if knobs.mode is Mode.INFERENCE:
            return
        if value is Update.IN_BACKWARD:
            frees = "update in backward frees each gradient at once"
            if (knobs.accumulation or 1) > 1:
                yield f"{frees}: accumulation={knobs.accumulation} needs them until the last micro-batch"
            if knobs.precision is Precision.FP16:
                yield f"{frees}: fp16's GradScaler looks at all of them before the step, bf16 needs none"
            if knobs.zero_grad is ZeroGrad.TO_ZERO:
                yield f"{frees}: zero_grad='set to zero' finds none"
        kind: Any = KINDS[knobs.optimizer][0] if knobs.optimizer in KINDS else type(explored.optimizer)
        if knobs.optimizer in KINDS or explored.optimizer is not None:
            try:
                update_settings(kind, value)
            except ValueError as error:
                yield str(error)

    def written(self, explored: Explored) -> str:
        """Return the implementation of an optimizer of torch, empty for optimizers of other libraries.

        The default of torch is "per tensor" on the CPU. Source: `torch.optim.optimizer._default_to_fused_or_foreach`;
        Adafactor and optimizers without the argument `foreach` iterate over the parameters.

        >>> weights = [torch.zeros(1)]
        >>> makes = torch.optim.AdamW(weights), torch.optim.AdamW(weights, fused=True)
        >>> [UpdateKnob().written(Explored(optimizer=optimizer)) for optimizer in makes]
        ['foreach', 'fused']
        """
        optimizer = explored.optimizer
        if optimizer is None or not type(optimizer).__module__.startswith("torch.optim"):
            return ""
        if optimizer.defaults.get("fused"):
            return "fused"
        foreach = optimizer.defaults.get("foreach")
        if foreach is None and "foreach" in optimizer.defaults:
            is_on_cpu = explored.tape is not None and explored.tape.meta.device == "cpu"
            foreach = not is_on_cpu and not isinstance(optimizer, torch.optim.Adafactor)
        return "foreach" if foreach else "per tensor"

    def unavailable(self, limits: Limits) -> str:
        """Return why there is no optimizer to make in another way."""
        return limits.no_optimizer

    def candidates(self, explored: Explored, gpu: Gpu) -> Iterable[Any]:
        """Return the implementations without temporaries; a cell calls the optimizer's step itself."""
        values = Update.PER_TENSOR, Update.FUSED, Update.IN_BACKWARD
        return values if explored.model is not None else values[:2]

    def estimate(self, value: Any, estimate: Estimate) -> None:
        """Leave out the temporaries, and in the backward pass the gradients."""
        if value is Update.IN_BACKWARD:
            estimate.constant -= estimate.gradients
            estimate.gradients = 0
        if value is not Update.FOREACH:
            estimate.fixed = estimate.constant

    def untouched(self, value: Any) -> Untouched:
        """Return all but the update, for updates after the backward pass."""
        return Untouched.ALL_BUT_UPDATE if value in (Update.FUSED, Update.PER_TENSOR) else Untouched.NOTHING


def parameter_names(kind: type[torch.optim.Optimizer]) -> set[str]:
    """Return the names of the arguments that an optimizer's class takes, except the weights.

    >>> "fused" in parameter_names(torch.optim.AdamW), "fused" in parameter_names(torch.optim.Adafactor)
    (True, False)
    """
    return set(list(inspect.signature(kind).parameters)[1:])


def update_settings(kind: type[torch.optim.Optimizer], update: Update) -> dict[str, Any]:
    """Return the arguments of an optimizer's class for an implementation of its update.

    >>> update_settings(torch.optim.Adafactor, Update.PER_TENSOR)
    {'foreach': False}

    Raises ValueError, which lists the updates that the class has, where it does not have this one.
    """
    if update not in UPDATE_SETTINGS:
        return {}
    takes = parameter_names(kind)
    implementation = {Update.FOREACH: "foreach", Update.FUSED: "fused"}.get(update)
    if implementation and implementation not in takes:
        others = [other.value for other in (Update.FOREACH, Update.FUSED) if other.value in takes]
        choices = ", ".join(map(repr, (*others, Update.PER_TENSOR.value, Update.IN_BACKWARD.value)))
        raise ValueError(f"{kind.__name__} has no {implementation} update; write update= one of {choices}")
    return {name: value for name, value in UPDATE_SETTINGS[update].items() if name in takes}
