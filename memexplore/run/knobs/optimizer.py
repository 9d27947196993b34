"""The knob `optimizer`: the class of the optimizer."""

from __future__ import annotations

import enum
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from memexplore.run.knobs.control import Control, Explored, choice
from memexplore.run.knobs.knob import Estimate, Group, Knob, Limits, Stage
from memexplore.run.knobs.values import OneOf

if TYPE_CHECKING:
    from memexplore.hardware.catalogue import Gpu
    from memexplore.run.knobs.knobs import Knobs


class Optimizer(enum.Enum):
    """Optimizer that updates the weights."""

    AS_WRITTEN = "as written"
    SGD = "SGD"
    MOMENTUM = "SGD with momentum"
    ADAM = "Adam"
    ADAMW = "AdamW"
    ADAFACTOR = "Adafactor"


KINDS: dict[Optimizer, tuple[type[torch.optim.Optimizer], dict[str, Any]]] = {
    Optimizer.SGD: (torch.optim.SGD, {"lr": 1e-3}),
    Optimizer.MOMENTUM: (torch.optim.SGD, {"lr": 1e-3, "momentum": 0.9}),
    Optimizer.ADAM: (torch.optim.Adam, {"lr": 1e-3}),
    Optimizer.ADAMW: (torch.optim.AdamW, {"lr": 1e-3}),
    Optimizer.ADAFACTOR: (torch.optim.Adafactor, {"lr": 1e-3}),
}
"""Class and settings of each optimizer."""


class OptimizerKnob(Knob):
    """The optimizer that updates the weights, with default arguments."""

    name = "optimizer"
    costs = "another training"
    values = OneOf(Optimizer)
    place = 60
    group = Group.OPTIMIZER
    is_primary = True
    locked = "The optimizer holds state for its weights: make another one and start again."
    stage = Stage.UPDATE
    adds_only_recomputation = True

    def phrase(self, value: Any) -> str:
        """Return the name of the optimizer."""
        return self.values.text(value)

    def written(self, explored: Explored) -> str:
        """Return the class of the optimizer."""
        return explored.optimizer_name if explored.optimizer is None else optimizer_name(explored.optimizer)

    def controls(self, explored: Explored) -> list[Control]:
        """Return a list of the optimizers; the optimizer as written may have other arguments than its namesake here."""
        own = self.written(explored)
        texts = {kind: f"{kind.value}, default arguments" if kind.value == own else kind.value for kind in Optimizer}
        return [choice(self, texts, own, is_primary=True)]

    def unavailable(self, limits: Limits) -> str:
        """Return why there is no optimizer to replace."""
        return limits.no_optimizer

    def alters_training(self, value: Any, model: nn.Module | None, knobs: Knobs) -> bool:
        """Return True."""
        return True

    def training_text(self, value: Any, knobs: Knobs) -> str:
        """Return what it means for the training."""
        return f"{value.value} replaces the optimizer, and needs a learning rate of its own."

    def candidates(self, explored: Explored, gpu: Gpu) -> Iterable[Any]:
        """Return optimizers with a smaller state."""
        return Optimizer.ADAFACTOR, Optimizer.MOMENTUM

    def estimate(self, value: Any, estimate: Estimate) -> None:
        """Leave out the state, or half of it."""
        saved = estimate.states if value in (Optimizer.ADAFACTOR, Optimizer.SGD) else estimate.states // 2
        estimate.constant, estimate.fixed = estimate.constant - saved, estimate.fixed - saved
        estimate.states -= saved


def optimizer_name(optimizer: torch.optim.Optimizer) -> str:
    """Return the class of an optimizer, and whether it has momentum.

    >>> optimizer_name(torch.optim.SGD([torch.zeros(1)], lr=1, momentum=0.9))
    'SGD with momentum'
    """
    name = type(optimizer).__name__
    return f"{name} with momentum" if name == "SGD" and optimizer.defaults.get("momentum") else name
