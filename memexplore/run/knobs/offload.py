"""The knob `offload`: tensors saved for the backward pass wait on the CPU."""

from __future__ import annotations

import enum
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any

import torch

from memexplore.run.knobs.applying.forward import run_forward_inside
from memexplore.run.knobs.applying.report import ApplyReport, Change
from memexplore.run.knobs.control import Explored
from memexplore.run.knobs.knob import Application, Estimate, Group, Knob, ModelCode, Stage, Untouched
from memexplore.run.knobs.values import OneOf

if TYPE_CHECKING:
    from memexplore.hardware.catalogue import Gpu

_ON_CPU = """\
def on_cpu(forward, *args, **kwargs):
    with torch.autograd.graph.save_on_cpu(pin_memory=True):
        return forward(*args, **kwargs)

model.forward = functools.partial(on_cpu, model.forward)
"""


class Offload(enum.Enum):
    """Location of tensors saved for backward."""

    AS_WRITTEN = "as written"
    SAVED_TENSORS = "saved tensors on the CPU"


class OffloadKnob(Knob):
    """Tensors that are saved for the backward pass wait on the CPU (`torch.autograd.graph.save_on_cpu`)."""

    name = "offload"
    costs = "equal results, several times slower"
    values = OneOf(Offload)
    place = 110
    group = Group.MODEL
    leaves = Untouched.ALL_BUT_ACTIVATIONS
    stage = Stage.SAVED_TENSORS
    adds_only_recomputation = True

    def phrase(self, value: Any) -> str:
        """Return what is moved."""
        return self.values.text(value)

    def apply(self, value: Any, application: Application) -> ApplyReport:
        """Run the forward of the model with `save_on_cpu`."""
        change = Change(self.name, self.phrase(value))
        if application.device.type == "cpu":
            # There `save_on_cpu` keeps the tensor itself, and a result that its own node holds is never freed.
            return ApplyReport((change,), (), ("The model is on the CPU: no tensor had to be moved there.",))
        run_forward_inside(
            application.log, application.model, lambda: torch.autograd.graph.save_on_cpu(pin_memory=True)
        )
        return ApplyReport((change,))

    def model_lines(self, value: Any, code: ModelCode) -> Iterator[str]:
        """Yield a function around the forward of the model."""
        yield _ON_CPU

    def candidates(self, explored: Explored, gpu: Gpu) -> Iterable[Any]:
        """Return the saved tensors."""
        return (Offload.SAVED_TENSORS,)

    def estimate(self, value: Any, estimate: Estimate) -> None:
        """Move most activations, which takes much time."""
        estimate.time = 5.0
        estimate.activations *= 0.35
