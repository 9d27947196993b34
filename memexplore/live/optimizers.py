"""Optimizers of a watched run: which of them end steps, and the size of their state."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch


class Optimizers:
    """The optimizers that were named, or all that update the watched models; none is kept alive."""

    def __init__(
        self, models: Sequence[Callable[[], torch.nn.Module | None]], chosen: Sequence[torch.optim.Optimizer]
    ) -> None:
        self._models = models
        self._chosen = [weakref.ref(optimizer) for optimizer in chosen]
        self.others = 0, ""
        """How many optimizers have stepped since a step of the run ended, without ending one; the type of the last."""
        self._relevant: weakref.WeakKeyDictionary[Any, bool] = weakref.WeakKeyDictionary()
        self._states: dict[int, tuple[int, int]] = {}
        """Id of an optimizer -> number of parameters with state, and the bytes of the state."""

    def _named(self) -> list[torch.optim.Optimizer]:
        return [optimizer for optimizer in (ref() for ref in self._chosen) if optimizer is not None]

    @property
    def chosen(self) -> int:
        """The number of optimizers that were named and exist, 0 for all."""
        return len(self._named())

    def end_steps(self, optimizer: torch.optim.Optimizer) -> bool:
        """Return whether steps of the run end when an optimizer has stepped, as it has now.

        None ends while a CUDA graph is captured: the driver refuses what a step's end reads, and the capture fails.
        """
        if torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing():
            return False
        ends = self._ends_steps(optimizer)
        self.others = (0, "") if ends else (self.others[0] + 1, type(optimizer).__name__)
        return ends

    def _ends_steps(self, optimizer: torch.optim.Optimizer) -> bool:
        named = self._named()
        if named:
            return any(other is optimizer for other in named)
        is_relevant = self._relevant.get(optimizer)
        if is_relevant is None:
            is_relevant = self._relevant[optimizer] = not self._models or self._updates_watched(optimizer)
        return is_relevant

    def seen(self) -> list[torch.optim.Optimizer]:
        """Return the optimizers of the run, as far as they have stepped or were named."""
        return self._named() or [optimizer for optimizer, updates in list(self._relevant.items()) if updates]

    def _updates_watched(self, optimizer: torch.optim.Optimizer) -> bool:
        models = [model for model in (ref() for ref in self._models) if model is not None]
        watched = {id(parameter) for model in models for parameter in model.parameters()}
        return any(id(parameter) in watched for group in optimizer.param_groups for parameter in group["params"])

    def note_state(self, optimizer: torch.optim.Optimizer) -> None:
        """Note the size of the state of an optimizer that has stepped; it is added up when it has grown."""
        count = len(optimizer.state)
        if self._states.get(id(optimizer), (-1, 0))[0] != count:
            states = [state for state in optimizer.state.values() if isinstance(state, dict)]
            values = [value for state in states for value in state.values() if isinstance(value, torch.Tensor)]
            self._states[id(optimizer)] = count, sum(value.numel() * value.element_size() for value in values)

    def state_size(self) -> int:
        """Return the bytes of the state of all optimizers."""
        return sum(size for _, size in self._states.values())


def unwrapped(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    """Return the optimizer that steps inside of one of accelerate or Lightning, which has it as `optimizer`."""
    inner = getattr(optimizer, "optimizer", None)
    return unwrapped(inner) if isinstance(inner, torch.optim.Optimizer) else optimizer


def several(values: Any, kind: type) -> list[Any]:
    """Return one value or several as a list.

    Raises TypeError for a value of another kind.
    """
    if values is None:
        return []
    listed = [values] if isinstance(values, kind) else list(values)
    for value in listed:
        if not isinstance(value, kind):
            raise TypeError(f"expected a {kind.__name__} or several of them, not a {type(value).__name__}")
    return listed
