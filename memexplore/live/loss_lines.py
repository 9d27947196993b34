"""Where the loop calls the watched model: calls go in, the lines of the loop that compute the loss come out.

They are looked for when a prediction needs them, if the function that called the model still runs then. Those of a
function that may have ended are looked for while it runs, for new shapes and not often. No tensor is held.
"""

from __future__ import annotations

import inspect
import sys
import time
import weakref
from types import FunctionType
from typing import Any

import torch

from memexplore.live.code_loss import Place, loss_in_loop, place_of_call, returned_loss
from memexplore.live.code_step import CodeLoss, tensors_in

_SECONDS = 2.0
"""Least time between two searches for the lines of a function, of some milliseconds each."""


class LossLines:
    """Finds the lines from the last call of a model to its backward pass."""

    def __init__(self) -> None:
        self._place: Place | None = None
        self._arguments: list[weakref.ref[torch.Tensor]] = []
        self._model: weakref.ref[torch.nn.Module] | None = None
        """The model of a call whose lines are to be looked for while its function runs."""
        self._found: CodeLoss | None = None
        """The lines of a function that may have ended."""
        self._next = 0.0

    def see(self, model: torch.nn.Module, args: Any, kwargs: Any, is_new: bool) -> None:
        """Note a call of a model; `is_new` tells that its shapes are."""
        arguments = tensors_in((args, kwargs or {}))
        self._arguments = [weakref.ref(each) for each in arguments]
        if not is_new:
            return
        frame = sys._getframe(1)
        self._place, self._found, self._model = place_of_call(frame), None, None
        if self._place is not None and self._place.is_in_function and time.monotonic() >= self._next:
            self._next = time.monotonic() + _SECONDS
            self._keep(returned_loss(frame, model, arguments))
            self._model = weakref.ref(model) if self._found is None else None

    def before_update(self) -> None:
        """Look for the lines of the last call, if its function still runs."""
        model = None if self._model is None else self._model()
        self._model = None
        if model is not None:
            self._keep(self._in_stack(model))

    def _keep(self, code: CodeLoss | None) -> None:
        self._found = None if code is None or _holds_tensors(code) else code

    def _in_stack(self, model: torch.nn.Module) -> CodeLoss | None:
        # Of an argument that is gone, an object that no variable is.
        arguments: list[Any] = [each() if each() is not None else object() for each in self._arguments]
        return None if self._place is None else loss_in_loop(sys._getframe(2), self._place, model, arguments)

    def code(self, model: torch.nn.Module) -> CodeLoss | None:
        """Return the lines for the last call of a model; None where they are not understood."""
        return self._in_stack(model) or self._found


def _holds_tensors(code: CodeLoss) -> bool:
    """Return whether values may hold tensors, as a criterion with weights does."""
    for value in code.values.values():
        if isinstance(value, torch.nn.Module):
            if next(value.parameters(), None) is not None or next(value.buffers(), None) is not None:
                return True
        elif callable(value) and not isinstance(value, FunctionType | type) and not inspect.isbuiltin(value):
            return True
    return False
