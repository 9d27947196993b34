"""Find the models on the GPU that no optimizer trains, such as a teacher."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from memexplore.out_of_memory.evidence_types import Holder, VariableUse
from memexplore.out_of_memory.reach import address_of, models_of
from memexplore.out_of_memory.updates import optimizers_in

_MOST_NAMES = 4
"""Names of models that are listed."""


def untrained(objects: list[Any], variables: Iterable[tuple[str, Any]]) -> Holder | None:
    """Return the float32 weights of the models among variables that are not trained; None without such a model.

    `objects` were reached. A model with weights that require a gradient counts only if an optimizer updates others, and
    a frozen part of a trained model does not count: the layers around it need its results in their own precision.
    """
    updated = {
        id(weight)
        for optimizer in optimizers_in(objects)
        for group in optimizer.param_groups
        for weight in group["params"]
    }

    def is_trained(weight: torch.Tensor) -> bool:
        return id(weight) in updated or (weight.requires_grad and not updated)

    modules = [module for module in objects if isinstance(module, torch.nn.Module)]
    trained = [module for module in modules if any(map(is_trained, module.parameters()))]
    inner = {id(part) for module in trained for part in module.modules()}
    sizes: dict[int, int] = {}
    names: list[str] = []
    for name, model in models_of(variables):
        if id(model) in inner:
            continue
        weights = [
            address_of(weight) for weight in model.parameters() if weight.dtype is torch.float32 and weight.is_cuda
        ]
        new = {address: size for address, size in weights if address and address not in sizes}
        if new:
            sizes |= new
            names.append(name)
    if not sizes:
        return None
    label = ", ".join(names) if len(names) <= _MOST_NAMES else ""
    return Holder(label, VariableUse.NOT_TRAINED, frozenset(sizes), frozenset(), sum(sizes.values()), len(sizes), True)
