"""Accumulation for a program that runs: what it calls at the end of each micro-batch acts in the last one only.

The program's loop makes one micro-batch in each pass. An optimizer's step acts in every `count`-th pass, and what
belongs to the step, such as `zero_grad`, acts where it would stand beside it in a loop with accumulation.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from memexplore.run.knobs.applying.undo import UndoLog
from memexplore.run.programs.hooks import wrap_function, wrap_method, wrap_steps
from memexplore.torch_internals.tensors import current_autograd_node


class MicroBatches:
    """Divides losses by the number of micro-batches, and lets each step act in the last of them, until restored.

    >>> model = nn.Linear(1, 1, bias=False)
    >>> optimizer, log = torch.optim.SGD(model.parameters(), lr=1.0), UndoLog()
    >>> micro_batches = MicroBatches(log, 2, {})
    >>> before = model.weight.item()
    >>> for _ in range(3):
    ...     optimizer.zero_grad()
    ...     model(torch.ones(1, 1)).sum().backward()
    ...     optimizer.step()
    >>> log.restore()
    >>> round(before - model.weight.item(), 3), model.weight.grad.item(), micro_batches.steps  # half a gradient twice
    (1.0, 0.5, 1)
    """

    def __init__(self, log: UndoLog, count: int, names: Mapping[str, Any]) -> None:
        self.passes = 0
        """Steps that the program has called."""
        self.steps = 0
        """Those that acted."""
        self.has_second_step = False
        """Whether an optimizer has acted twice, so that a step began with the optimizer's state."""
        self._count = count
        self._is_stepping = False
        self._calls: weakref.WeakKeyDictionary[Optimizer, int] = weakref.WeakKeyDictionary()
        """Steps that the program has called, by optimizer."""
        self._skipped: weakref.WeakSet[torch.amp.GradScaler] = weakref.WeakSet()
        """Scalers whose last step did not act."""
        wrap_function(log, (torch.autograd,), "backward", self._backward)
        wrap_steps(log, self._step)
        wrap_method(log, Optimizer, "zero_grad", self._zero_grad)
        wrap_function(log, (nn.Module,), "zero_grad", self._zero_grad_of_model)
        wrap_method(log, LRScheduler, "step", self._schedule)
        for name, wrapper in (("step", self._scaled_step), ("unscale_", self._unscale), ("update", self._update)):
            wrap_method(log, torch.amp.GradScaler, name, wrapper)
        for name in ("clip_grad_norm_", "clip_grad_value_"):
            wrap_function(log, (nn.utils, nn.utils.clip_grad), name, self._clip)
        for optimizer in names.values():
            if isinstance(optimizer, Optimizer) and "step" in vars(optimizer):
                # Of a scheduler, which has kept the step of the class as it was.
                step = functools.partial(_without_self, vars(optimizer)["step"])
                call = functools.wraps(vars(optimizer)["step"])(functools.partial(self._step, step, optimizer))
                log.set_item(vars(optimizer), "step", call)

    def _acts_next(self, optimizer: Optimizer) -> bool:
        return (self._calls.get(optimizer, 0) + 1) % self._count == 0

    def _is_between_steps(self, optimizer: Optimizer) -> bool:
        """Return whether no micro-batch has been computed since the last step that acted."""
        return self._calls.get(optimizer, 0) % self._count == 0

    def _backward(self, function: Any, tensors: Any, *args: Any, **kwargs: Any) -> Any:
        if current_autograd_node() is not None:  # the backward pass of a checkpoint inside of another
            return function(tensors, *args, **kwargs)
        losses = (tensors,) if isinstance(tensors, torch.Tensor) else tensors
        with torch.enable_grad():
            shares = tuple(loss / self._count for loss in losses)
        return function(shares, *args, **kwargs)

    def _step(self, step: Any, optimizer: Optimizer, *args: Any, **kwargs: Any) -> Any:
        if self._is_stepping or "param_groups" not in vars(optimizer):  # of a wrapper, such as accelerate's
            return step(optimizer, *args, **kwargs)
        self.passes += 1
        self._is_stepping = True
        try:
            if self._acts_next(optimizer):
                self.steps += 1
                self.has_second_step |= self._calls.get(optimizer, 0) >= self._count
                return step(optimizer, *args, **kwargs)
            closure = args[0] if args else kwargs.get("closure")
            if closure is None:
                return None
            with torch.enable_grad():
                return closure()
        finally:
            self._is_stepping = False
            self._calls[optimizer] = self._calls.get(optimizer, 0) + 1

    def _zero_grad(self, zero_grad: Any, optimizer: Optimizer, *args: Any, **kwargs: Any) -> None:
        if self._is_between_steps(optimizer):
            zero_grad(optimizer, *args, **kwargs)

    def _zero_grad_of_model(self, zero_grad: Any, model: nn.Module, *args: Any, **kwargs: Any) -> None:
        if all(map(self._is_between_steps, self._optimizers_of(model.parameters()))):
            zero_grad(model, *args, **kwargs)

    def _optimizers_of(self, weights: Iterable[torch.Tensor]) -> list[Optimizer]:
        """Return the optimizers that have stepped and that have one of these weights."""
        wanted = set(map(id, weights))
        return [
            optimizer
            for optimizer in self._calls
            if any(id(weight) in wanted for group in optimizer.param_groups for weight in group["params"])
        ]

    def _schedule(self, step: Any, scheduler: LRScheduler, *args: Any, **kwargs: Any) -> None:
        if self._is_between_steps(scheduler.optimizer):
            step(scheduler, *args, **kwargs)

    def _scaled_step(self, step: Any, scaler: Any, optimizer: Optimizer, *args: Any, **kwargs: Any) -> Any:
        if not scaler.is_enabled() or self._acts_next(optimizer):
            self._skipped.discard(scaler)
            return step(scaler, optimizer, *args, **kwargs)
        self._skipped.add(scaler)
        return optimizer.step(*args, **kwargs)  # which counts, and does not act

    def _unscale(self, unscale: Any, scaler: Any, optimizer: Optimizer) -> None:
        if self._acts_next(optimizer):
            unscale(scaler, optimizer)

    def _update(self, update: Any, scaler: Any, *args: Any, **kwargs: Any) -> None:
        if scaler not in self._skipped:
            update(scaler, *args, **kwargs)

    def _clip(self, clip: Any, parameters: Any, *args: Any, **kwargs: Any) -> Any:
        weights = [parameters] if isinstance(parameters, torch.Tensor) else list(parameters)
        optimizers = self._optimizers_of(weights)
        if optimizers and all(map(self._acts_next, optimizers)):
            return clip(weights, *args, **kwargs)
        return torch.zeros(())


def _without_self(step: Any, optimizer: Optimizer, *args: Any, **kwargs: Any) -> Any:
    return step(*args, **kwargs)
