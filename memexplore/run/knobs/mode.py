"""The knob `mode`: training, or inference alone."""

from __future__ import annotations

import enum
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from memexplore.run.knobs.applying.forward import run_forward_inside
from memexplore.run.knobs.applying.loop import Loop
from memexplore.run.knobs.applying.report import ApplyReport, Change
from memexplore.run.knobs.knob import Application, Group, Knob, ModelCode, Stage
from memexplore.run.knobs.values import OneOf

if TYPE_CHECKING:
    from memexplore.run.knobs.knobs import Knobs


class Mode(enum.Enum):
    """Whether the step trains, or only runs forward with `eval()` and `no_grad()`."""

    AS_WRITTEN = "as written"
    INFERENCE = "inference"


class ModeKnob(Knob):
    """Whether the step trains, or only runs forward with `eval()` and `no_grad()`."""

    name = "mode"
    costs = "no training"
    values = OneOf(Mode)
    place = 120
    group = Group.MODEL
    needs_step = "{} calls backward itself"
    locked = "A loop that trains cannot switch to inference: its backward pass would have nothing to do."
    stage = Stage.MODE

    def phrase(self, value: Any) -> str:
        """Return the mode."""
        return self.values.text(value)

    def apply(self, value: Any, application: Application) -> ApplyReport:
        """Put the modules into evaluation mode, and run the forward without gradients."""
        for module in application.model.modules():
            application.log.add(setattr, module, "training", module.training)
        application.model.eval()
        run_forward_inside(application.log, application.model, torch.no_grad)
        return ApplyReport((Change(self.name, self.phrase(value)),))

    def change_loop(self, value: Any, loop: Loop) -> None:
        """Run neither backward pass nor update."""
        loop.trains = False

    def model_lines(self, value: Any, code: ModelCode) -> Iterator[str]:
        """Yield the change to evaluation mode."""
        yield "model.eval()"

    def alters_training(self, value: Any, model: nn.Module | None, knobs: Knobs) -> bool:
        """Return True."""
        return True

    def training_text(self, value: Any, knobs: Knobs) -> str:
        """Return what it means for the training."""
        return "Nothing trains."
