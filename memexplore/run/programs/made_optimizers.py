"""The optimizer, LoRA and frozen layers of a program that runs: they act where the program makes an optimizer."""

from __future__ import annotations

import gc
import inspect
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from memexplore.run.knobs.applying.undo import UndoLog
from memexplore.run.knobs.knobs import Knobs
from memexplore.run.knobs.optimizer import KINDS
from memexplore.run.knobs.optimizer import Optimizer as Choice
from memexplore.run.programs.hooks import gives_parameters, wrap_method
from memexplore.run.programs.optimizers import update_settings


class MadeOptimizers:
    """Makes the optimizers of a program as knobs say, until restored.

    `change` applies LoRA and frozen layers to a model.

    >>> log, model = UndoLog(), nn.Linear(1, 1)
    >>> made = MadeOptimizers(log, Knobs(optimizer="SGD with momentum"), lambda model: None)
    >>> optimizer = torch.optim.AdamW(model.parameters(), lr=0.5)
    >>> log.restore()
    >>> optimizer.defaults["momentum"], optimizer.defaults["lr"], isinstance(optimizer, torch.optim.AdamW)
    (0.9, 0.5, True)
    """

    def __init__(self, log: UndoLog, knobs: Knobs, change: Callable[[nn.Module], object]) -> None:
        self.number = 0
        """Optimizers that were made."""
        self._knobs, self._change = knobs, change
        self._is_making = False
        wrap_method(log, Optimizer, "__init__", self._make)

    def _make(self, init: Any, optimizer: Optimizer, *args: Any, **kwargs: Any) -> None:
        if self._is_making or not gives_parameters(args, kwargs):
            init(optimizer, *args, **kwargs)
            return
        self._is_making = True
        try:
            parameters, *others = args or (kwargs.pop("params"),)
            groups = self._groups(list(parameters))
            if self._knobs.optimizer is Choice.AS_WRITTEN:
                kwargs |= update_settings(type(optimizer), self._knobs.update)
                init(optimizer, groups, *others, **kwargs)
            else:
                self._replace(optimizer, groups, _learning_rate(init, (optimizer, groups, *others), kwargs))
            self.number += 1
        finally:
            self._is_making = False

    def _replace(self, optimizer: Optimizer, groups: list[Any], rate: Any) -> None:
        """Make an optimizer of the knob's class with its default settings and the learning rates as written."""
        kind, settings = KINDS[self._knobs.optimizer]
        settings = settings | update_settings(kind, self._knobs.update)
        if rate is not None:
            settings["lr"] = rate
        written = type(optimizer)
        optimizer.__class__ = kind
        kept = ("params", "lr")
        groups = [
            {name: group[name] for name in kept if name in group} if isinstance(group, dict) else group
            for group in groups
        ]
        kind.__init__(optimizer, groups, **settings)
        # For `isinstance`, which asks for this attribute too.
        optimizer.__class__ = type(kind.__name__, (kind,), {"__class__": property(lambda self: written)})

    def _groups(self, groups: list[Any]) -> list[Any]:
        """Return parameters or groups of them, with LoRA's and without parameters that do not train."""
        if not (self._knobs.lora or self._knobs.frozen):
            return groups
        weights = _weights(groups)
        model = _model_with(weights, (*self._knobs.lora, *self._knobs.frozen))
        if model is None:
            return groups
        before = set(map(id, model.parameters()))
        self._change(model)
        added = [weight for weight in model.parameters() if id(weight) not in before]
        if groups and isinstance(groups[0], dict):
            first, *others = groups
            return [{**first, "params": [*first["params"], *added]}, *others]
        return [*weights, *added]


def _weights(groups: Iterable[Any]) -> list[torch.Tensor]:
    """Return the parameters in what an optimizer is made of: parameters, pairs with their names, or groups."""
    weights: list[torch.Tensor] = []
    for part in groups:
        if isinstance(part, dict):
            members = part["params"]
            part["params"] = [members] if isinstance(members, torch.Tensor) else list(members)
            weights += _weights(part["params"])
        else:
            weights.append(part[1] if isinstance(part, tuple) else part)
    return weights


def _model_with(weights: list[torch.Tensor], names: tuple[str, ...]) -> nn.Module | None:
    """Return the largest model that has some weights and the named layers, None where no model has the weights.

    Where none of them has the layers, it is the largest, and its change says which layers there are.
    """
    wanted = set(map(id, weights))
    models = [
        thing
        for thing in gc.get_objects()
        if issubclass(type(thing), nn.Module) and any(id(weight) in wanted for weight in thing.parameters())
    ]
    models.sort(key=lambda model: -sum(1 for _ in model.modules()))
    for model in models:
        layers = dict(model.named_modules())
        if all(name in layers for name in names):
            return model
    return models[0] if models else None


def _learning_rate(init: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Return the learning rate with which a constructor is called, None if it has none."""
    bound = inspect.signature(init).bind(*args, **kwargs)
    bound.apply_defaults()
    arguments = bound.arguments | kwargs
    defaults = arguments.get("defaults")
    return arguments.get("lr", defaults.get("lr") if isinstance(defaults, dict) else None)
