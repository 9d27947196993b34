"""The knob `frozen`: layers whose weights do not train."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from memexplore.run.knobs.applying.layer_names import check_names, for_layers
from memexplore.run.knobs.applying.report import ApplyReport, Change, counted
from memexplore.run.knobs.applying.undo import UndoLog
from memexplore.run.knobs.checkpoints.blocks import repeated
from memexplore.run.knobs.control import Control, Explored, layer_names
from memexplore.run.knobs.knob import Application, Estimate, Group, Knob, Limits, ModelCode, Stage
from memexplore.run.knobs.values import LayerNames
from memexplore.torch_internals.modules import BatchNorm

if TYPE_CHECKING:
    from memexplore.hardware.catalogue import Gpu
    from memexplore.run.knobs.knobs import Knobs


class FrozenKnob(Knob):
    """Layers whose weights do not train, with all layers below them; the empty name is the whole model."""

    name = "frozen"
    costs = "another training, faster"
    values = LayerNames()
    place = 130
    group = Group.LAYERS
    locked = "Frozen layers need an optimizer without their weights: freeze them and start again."
    stage = Stage.WEIGHTS

    def phrase(self, value: Any) -> str:
        """Return the number of layers."""
        return f"frozen on {counted(len(value), 'layer')}"

    def layers(self, value: Any) -> tuple[str, ...]:
        """Return the layers."""
        names: tuple[str, ...] = value
        return names

    def apply(self, value: Any, application: Application) -> ApplyReport:
        """Disable the gradients of the weights."""
        return freeze(application.log, application.model, value)

    def controls(self, explored: Explored) -> list[Control]:
        """Return a text with the names of the layers."""
        return [layer_names(self)]

    def why_not_layer(self, module: nn.Module) -> str:
        """Return that a layer has nothing to freeze."""
        return "" if any(True for _ in module.parameters(recurse=False)) else "This layer has no weights"

    def unavailable(self, limits: Limits) -> str:
        """Return why no optimizer can be made without the weights."""
        return limits.no_optimizer

    def model_lines(self, value: Any, code: ModelCode) -> Iterator[str]:
        """Yield a loop over the layers."""
        yield for_layers(value, "model.get_submodule(name).requires_grad_(False)")

    def alters_training(self, value: Any, model: nn.Module | None, knobs: Knobs) -> bool:
        """Return True."""
        return True

    def training_text(self, value: Any, knobs: Knobs) -> str:
        """Return what it means for the training."""
        return f"{value[0]} does not train." if len(value) == 1 else f"{len(value)} layers do not train."

    def candidates(self, explored: Explored, gpu: Gpu) -> Iterable[Any]:
        """Return the first half of the repeated blocks, and all but the last quarter of them."""
        return () if explored.model is None else blocks_to_freeze(explored.model)

    def estimate(self, value: Any, estimate: Estimate) -> None:
        """Leave out half of gradients and optimizer state, and activations of frozen blocks."""
        gradients, states = estimate.gradients // 2, estimate.states // 2
        estimate.constant, estimate.fixed = estimate.constant - gradients - states, estimate.fixed - gradients - states
        estimate.gradients, estimate.states = estimate.gradients - gradients, estimate.states - states
        estimate.time = 0.7
        estimate.activations *= 0.6


def freeze(log: UndoLog, model: nn.Module, names: tuple[str, ...]) -> ApplyReport:
    """Disable the gradients of the weights of named layers and of all layers below them.

    >>> log, model = UndoLog(), nn.Sequential(nn.Linear(1, 1), nn.Linear(1, 1))
    >>> freeze(log, model, ("0",)).texts
    ('2 weights frozen',)
    >>> [weight.requires_grad for weight in model.parameters()]
    [False, False, True, True]
    >>> log.restore()

    Raises ValueError for a name without a layer, or for layers without weights.
    """
    check_names(model, names)
    layers = [model.get_submodule(name) for name in names]
    count = stop_gradients(log, (weight for layer in layers for weight in layer.parameters()))
    if names and not count:
        raise ValueError(f"{', '.join(names)} has no weights that could be frozen; name a layer with weights")
    notes: tuple[str, ...] = ()
    if any(isinstance(module, BatchNorm) for layer in layers for module in layer.modules()):
        notes = ("Batch norm in frozen layers still updates its running statistics.",)
    return ApplyReport((Change("frozen", f"{counted(count, 'weight')} frozen"),), (), notes)


def stop_gradients(log: UndoLog, weights: Iterable[torch.Tensor]) -> int:
    """Set `requires_grad` of weights to False; return the number of distinct weights."""
    different = {id(weight): weight for weight in weights}.values()
    for weight in different:
        log.add(weight.requires_grad_, weight.requires_grad)
        weight.requires_grad_(False)
    return len(different)


def blocks_to_freeze(model: nn.Module) -> tuple[tuple[str, ...], ...]:
    """Return layers to freeze: the first half of the repeated blocks, and all but the last quarter of them.

    All layers registered before these blocks are included: while an embedding trains, backward reaches down to it, and
    the frozen blocks in between keep their activations.

    >>> layers = [nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4)) for _ in range(4)]
    >>> blocks_to_freeze(nn.Sequential(nn.Embedding(9, 4), *layers, nn.LayerNorm(4)))
    (('0', '1', '2'), ('0', '1', '2', '3'))
    """
    names = repeated(model)
    counts = dict.fromkeys((len(names) // 2, len(names) - max(1, len(names) // 4))) if len(names) > 1 else ()
    return tuple(_layers_through(model, model.get_submodule(names[count - 1])) for count in counts)


def _layers_through(model: nn.Module, last: nn.Module) -> tuple[str, ...]:
    """The fewest layers that together have all weights registered up to the end of `last`."""
    weights = list(model.parameters())
    ends = {id(weight) for weight in last.parameters()}
    end = max(number for number, weight in enumerate(weights) if id(weight) in ends)
    remaining = {id(weight) for weight in weights[: end + 1]}
    wanted = frozenset(remaining)
    names: list[str] = []
    for name, module in model.named_modules():
        own = {id(weight) for weight in module.parameters()}
        # Layers inside a chosen one, and layers whose weights are shared with one, have no remaining weight.
        if own & remaining and own <= wanted:
            names.append(name)
            remaining -= own
    return tuple(names)
