"""Run the user's lines that call a model and compute its loss, one step after the other.

Variables hold their tensors from step to step as they do in the user's loop. The lines (`CodeLoss`) and the arguments
of the call come from another process.
"""

from __future__ import annotations

import contextlib
import enum
import functools
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch

from memexplore.run.knobs.applying.forward import device_of
from memexplore.virtual_gpu.device import active

CALLED, LOSS = "_model_call", "_loss"
"""Names in the lines for the call of the model, and for the loss."""
_DEPTH = 8
"""Levels of containers that are looked into, as in `observed.template`."""
IN_LOOP = "memexplore_in_loop"
"""Attribute of the class of what `watch` hands its loop."""


class Lifetime(enum.StrEnum):
    """How long the variables of the lines hold their tensors."""

    UNTIL_RETURN = enum.auto()
    """The function returns the loss."""
    DURING_STEP = enum.auto()
    UNTIL_ASSIGNED = enum.auto()
    """In a loop, until the same line of the next step."""


class Argument(NamedTuple):
    """A variable that is a tensor among the arguments of the model."""

    position: int


class Model(NamedTuple):
    """The model itself among the values."""


class Loop(NamedTuple):
    """What `watch` hands its loop, among the values."""


class CodeLoss(NamedTuple):
    """Lines that call the model and compute its loss."""

    lines: str
    values: dict[str, Any]
    """Name -> value; tensors are templates, and the model's arguments are `Argument`."""
    held: Lifetime


class CodeStep:
    """Calls a model and computes its loss by lines of code, for one run after the other."""

    def __init__(self, code: CodeLoss, autocast: tuple[str, torch.dtype] | None) -> None:
        self._code, self._autocast = code, autocast
        self._names: dict[str, Any] = {}
        """The variables of the lines, which hold tensors during backward."""
        self._gpu: Any = None

    def end(self) -> None:
        """Drop what the variables hold."""
        self._names.clear()

    def __call__(self, model: Any, args: Any, kwargs: Any, values: dict[str, Any]) -> Any:
        """Return the loss; `values` are the values of the code, with tensors."""
        if self._code.held is not Lifetime.UNTIL_ASSIGNED or self._gpu is not active():
            self._names.clear()
        self._gpu = active()
        names = self._names
        arguments = tensors_in((args, kwargs))
        loop = _InLoop(device_of(model).type)
        names.update({name: _filled(value, model, arguments, loop) for name, value in values.items()})
        names[CALLED] = functools.partial(self._call_model, model, args, kwargs)
        follows = any(isinstance(value, Loop) for value in self._code.values.values())
        with loop.elsewhere() if follows else contextlib.nullcontext():
            exec(compile(self._code.lines, "<step>", "exec", dont_inherit=True), names)
        loss = names.pop(LOSS)
        # The arguments of the model are the caller's.
        for name in (CALLED, *values) if self._code.held is not Lifetime.UNTIL_RETURN else tuple(names):
            names.pop(name, None)
        return loss

    def _call_model(self, model: Any, args: Any, kwargs: Any) -> Any:
        if self._autocast is None:
            return model(*args, **kwargs)
        with torch.autocast(self._autocast[0], dtype=self._autocast[1]):
            return model(*args, **kwargs)


class _InLoop:
    """What the lines call instead of `live`: its autocast is that around the step, which has no effect elsewhere."""

    def __init__(self, device: str) -> None:
        self._device = device
        self._dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else None

    def autocast(self, written: torch.dtype | None = None) -> contextlib.AbstractContextManager[Any]:
        """Return the autocast of the step, else that which is written."""
        dtype = self._dtype or written
        return contextlib.nullcontext() if dtype is None else torch.autocast(self._device, dtype=dtype)

    def elsewhere(self) -> contextlib.AbstractContextManager[Any]:
        """Return the context of lines that are not in its autocast."""
        return contextlib.nullcontext() if self._dtype is None else torch.autocast(self._device, enabled=False)


def _filled(value: Any, model: Any, arguments: list[torch.Tensor], loop: _InLoop) -> Any:
    """Return a value of the code with the arguments and the model in their places."""
    if isinstance(value, Argument):
        return arguments[value.position]
    if isinstance(value, Model):
        return model
    if isinstance(value, Loop):
        return loop
    if isinstance(value, torch.nn.Module):
        # Such as the weights of a criterion.
        return value.to(device_of(model))
    if type(value) is dict:
        return {key: _filled(part, model, arguments, loop) for key, part in value.items()}
    if type(value) in (tuple, list):
        return type(value)(_filled(part, model, arguments, loop) for part in value)
    return value


def tensors_in(value: Any, depth: int = _DEPTH) -> list[torch.Tensor]:
    """Return the tensors in arguments of a model, in the order of their templates.

    >>> [each.item() for each in tensors_in(((torch.tensor(1), {"x": [torch.tensor(2)]}), {"y": torch.tensor(3)}))]
    [1, 2, 3]
    """
    if isinstance(value, torch.Tensor):
        return [value]
    if not depth:
        return []
    parts = value.values() if isinstance(value, Mapping) else value if isinstance(value, tuple | list) else ()
    return [tensor for part in parts for tensor in tensors_in(part, depth - 1)]
