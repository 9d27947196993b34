"""Apply knobs to the watched models, and restore everything.

How to undo each change is noted before it is made, in one log for all models, and undoing may be repeated.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import nn

from memexplore.run.knobs.applying.apply import apply_until_restored, of_model_in_loop
from memexplore.run.knobs.applying.forward import wrap_forward
from memexplore.run.knobs.applying.report import ApplyReport
from memexplore.run.knobs.applying.undo import UndoLog
from memexplore.run.knobs.checkpoints.setting import Checkpoint, CheckpointKind
from memexplore.run.knobs.knobs import Knobs
from memexplore.torch_internals.modules import ENGINE_RUN_BACKWARD, is_compiled

_SHARDED = ("FSDP", "FullyShardedDataParallel")
"""Parts of the names of classes of modules whose weights are in shards."""
_WRAPPERS = (nn.parallel.DistributedDataParallel,)


def inner(model: nn.Module) -> nn.Module:
    """Return the model inside of `DistributedDataParallel`, else the model itself."""
    return model.module if isinstance(model, _WRAPPERS) else model


def layers_of(knobs: Knobs, model: nn.Module) -> Knobs:
    """Return knobs without the named layers that the model lacks.

    >>> print(layers_of(Knobs(checkpoint="layers 0 head"), nn.Sequential(nn.Linear(1, 1))))
    checkpoint layers 0
    """
    if knobs.checkpoint.kind is not CheckpointKind.LAYERS:
        return knobs
    have = dict(model.named_modules(remove_duplicate=False))
    layers = tuple(name for name in knobs.checkpoint.layers if name in have)
    return knobs.replace(checkpoint=Checkpoint(CheckpointKind.LAYERS, layers=layers) if layers else Checkpoint())


class Setting:
    """Knobs in effect. `failed` gets the error of a first step with a setting.

    No model is kept alive while the setting is as written.
    """

    def __init__(self, failed: Callable[[Exception], object]) -> None:
        self.knobs = Knobs()
        self.report = ApplyReport()
        """What the knobs changed in the models."""
        self._failed = failed
        self._log = UndoLog()
        self._first_step = FirstStep(failed)

    def switch(self, knobs: Knobs, models: Iterable[nn.Module]) -> None:
        """Apply knobs to models instead of those before. After an exception `restore` must be called."""
        self.restore()
        own = of_model_in_loop(knobs)
        self._first_step = FirstStep(self._failed)
        for model in map(inner, models):
            if own != Knobs():
                layers = layers_of(own, model)
                self.report += apply_until_restored(self._log, layers, model, self._first_step.in_place_failed)
            if not is_compiled(model):
                self._first_step.watch_calls(model)
        self._first_step.watch_backward()
        self.knobs = knobs

    def restore(self) -> None:
        """Restore the models; it may be called twice."""
        self._first_step.end()
        self._log.restore()
        self.knobs, self.report = Knobs(), ApplyReport()

    def end_first_step(self) -> str:
        """End the first step with the knobs; return what failed in it and raised no error, "" if nothing did."""
        self._first_step.end()
        return self._first_step.in_place_error


class FirstStep:
    """Observes the first step of a setting: `failed` gets the error of a forward or backward pass."""

    def __init__(self, failed: Callable[[Exception], object]) -> None:
        self._failed = failed
        self._log = UndoLog()
        self._thread = threading.get_ident()
        self._runs = False
        """Whether a call that is observed runs: those inside of it, such as one on fake tensors, are parts of it."""
        self.in_place_error = ""

    def watch_calls(self, model: nn.Module) -> None:
        """Observe the calls of a model, outside of all knobs."""
        wrap_forward(self._log, model, self._observe)

    def watch_backward(self) -> None:
        """Observe the backward passes of the calling thread."""
        owner, name = ENGINE_RUN_BACKWARD
        self._log.add(setattr, owner, name, ENGINE_RUN_BACKWARD.value)
        setattr(owner, name, functools.partial(self._observe, ENGINE_RUN_BACKWARD.value))

    def _observe(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if self._runs or threading.get_ident() != self._thread:
            return function(*args, **kwargs)
        self._runs = True
        try:
            return function(*args, **kwargs)
        except Exception as error:
            self._failed(error)
            raise
        finally:
            self._runs = False

    def in_place_failed(self, error: Exception) -> None:
        """Note that the model cannot run on fake tensors: its activations stay as written in this step."""
        self.in_place_error = f"no in-place activations were found, as the model cannot run on fake tensors ({error})"

    def end(self) -> None:
        """Observe no longer; it may be called twice."""
        self._log.restore()


def layout_kept_by(models: Sequence[nn.Module], optimizers: Iterable[torch.optim.Optimizer]) -> str:
    """Return what needs the memory format of the weights as it is, "" if nothing does.

    Fused updates of torch refuse weights and state of different strides, and DDP's buckets hold gradients.
    """
    if any(isinstance(model, _WRAPPERS) for model in models):
        return "DistributedDataParallel"
    for optimizer in optimizers:
        if any(group.get("fused") for group in optimizer.param_groups):
            return f"The fused {type(optimizer).__name__}"
    return ""


def no_model(models: Sequence[nn.Module], compiled: bool) -> str:
    """Return why models cannot be changed, as a sentence, "" if they can."""
    if not models:
        return "No model was called yet: wait for the end of the first step."
    if compiled:
        return "The model is compiled, and a change would make the compiler compile it again: start again without it."
    for model in models:
        if isinstance(model, nn.DataParallel):
            return "DataParallel copies the model to each GPU at every call: use DistributedDataParallel instead."
        if isinstance(model, torch.jit.ScriptModule):
            return "The model is a ScriptModule, whose code is fixed: watch the Python model instead."
        if any(name in type(module).__name__ for module in model.modules() for name in _SHARDED):
            return "FSDP holds the layers' weights in shards and hooks their calls: set the knob before it wraps them."
    return ""
