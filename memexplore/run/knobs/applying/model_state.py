"""Preservation of state for a block: attributes, gradients and values of a model, and random states.

Each function is a context manager that restores on exit, after an exception and an interrupt too. They take what they
preserve and compose: a run on a virtual GPU preserves `preserve_model_state` alone, one on a real device also
`preserve_weight_storage`.
"""

from __future__ import annotations

import contextlib
import enum
import random
from collections import OrderedDict
from collections.abc import Iterable
from typing import Any

import numpy as np
import torch
from torch import nn

from memexplore.run.knobs.applying.undo import UndoLog, undone_after
from memexplore.torch_internals.tensors import gradient_of

_CONTAINERS = (list, dict, OrderedDict, set)


class Gradients(enum.Enum):
    """Gradients at the start of a block; afterwards they are as before."""

    AS_THEY_ARE = "as they are"
    NONE = "none"


def preserve_model_state(
    modules: nn.Module | Iterable[nn.Module], gradients: Gradients = Gradients.NONE
) -> contextlib.AbstractContextManager[None]:
    """Preserve all attributes of a model, or of some modules, for the block.

    Afterwards each module has the weights, buffers, layers, hooks, training flag and other attributes that it had, each
    list, dict and set among them its content, and each weight its gradient and its `requires_grad`. Values of weights
    and buffers are not preserved. `gradients` are those at the start of the block.

    >>> model = nn.Linear(2, 2)
    >>> with preserve_model_state(model):
    ...     model.calls, model.bias = 1, None
    >>> hasattr(model, "calls"), model.bias is None
    (False, False)
    """
    preserved = list(modules.modules() if isinstance(modules, nn.Module) else modules)
    return undone_after(lambda log: _record_state(log, preserved, gradients))


def _record_state(log: UndoLog, modules: list[nn.Module], gradients: Gradients) -> None:
    weights = {id(weight): weight for module in modules for weight in module.parameters(recurse=False)}.values()
    for weight in weights:
        log.add(_restore_gradient, weight, gradient_of(weight), weight.requires_grad)
    for module in modules:
        # Restored in reverse order: the attributes before the content of the containers among them.
        containers = [value for value in vars(module).values() if type(value) in _CONTAINERS]
        log.add(_empty, [value for value in containers if not value])
        for value in filter(None, containers):
            log.add(refill, value, value.copy())
        log.add(refill, vars(module), dict(vars(module)))
    if gradients is Gradients.NONE:
        for weight in weights:
            weight.grad = None


def _restore_gradient(weight: torch.Tensor, gradient: torch.Tensor | None, required: bool) -> None:
    weight.requires_grad_(required)
    if gradient_of(weight) is not gradient:
        weight.grad = None
        weight.grad = gradient


def _empty(containers: list[Any]) -> None:
    for container in containers:
        # Most still are, such as a module's tables of hooks.
        if container:
            container.clear()


def refill(container: Any, content: Any) -> None:
    """Give a list, dict or set the content of another one."""
    if isinstance(container, list):
        container[:] = content
        return
    container.clear()
    container.update(content)


def preserve_weight_storage(model: nn.Module) -> contextlib.AbstractContextManager[None]:
    """Preserve which memory the weights of a model use, so that a block may move them and write to the copies.

    The weights stay the same objects: an optimizer or a loss that holds them has them in the block as well. Gradients
    of the copies are dropped; enter `preserve_model_state` outside to preserve the gradients from before.
    """

    def record(log: UndoLog) -> None:
        for weight in model.parameters():
            log.add(_restore_data, weight, weight.data)

    return undone_after(record)


def _restore_data(weight: torch.Tensor, data: torch.Tensor) -> None:
    weight.grad = None  # the gradient of the copy, perhaps on another device
    weight.data = data


def preserve_values(tensors: Iterable[torch.Tensor]) -> contextlib.AbstractContextManager[None]:
    """Preserve the values and the memory of tensors; meanwhile copies of the values wait on the CPU."""
    different = list({id(tensor): tensor for tensor in tensors}.values())

    def record(log: UndoLog) -> None:
        for tensor in different:
            log.add(_restore_values, tensor, tensor.data, tensor.data.to("cpu", copy=True))

    return undone_after(record)


def _restore_values(tensor: torch.Tensor, data: torch.Tensor, values: torch.Tensor) -> None:
    tensor.data = data
    data.copy_(values)


def preserve_random_states() -> contextlib.AbstractContextManager[None]:
    """Preserve the random states of Python and numpy; for torch's use `torch.random.fork_rng`."""

    def record(log: UndoLog) -> None:
        log.add(random.setstate, random.getstate())
        log.add(np.random.set_state, np.random.get_state())

    return undone_after(record)
