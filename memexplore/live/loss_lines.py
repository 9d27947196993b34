"""Find the lines of the loop that compute the loss, from the calls of the watched model.

The lines are looked for when a prediction needs them, if the function that called the model still runs then. If it may
have ended by then, they are looked for while it runs, for new shapes and not often. No tensor is held.
"""

from __future__ import annotations

import inspect
import sys
import time
import weakref
from types import FunctionType
from typing import Any

import torch

from memexplore.live.code_loss import CallSite, call_site, loss_in_loop, returned_loss
from memexplore.live.code_step import CodeLoss, tensors_in

_SECONDS = 2.0
"""Least time between two searches for the lines of a function, of some milliseconds each."""


class LossLines:
    """Finds the lines from the last call of a model to its backward pass."""

    def __init__(self) -> None:
        self._place: CallSite | None = None
        self._arguments: list[weakref.ref[torch.Tensor]] = []
        self._model: weakref.ref[torch.nn.Module] | None = None
        """The model of a call whose lines are to be looked for while its function runs."""
        self._lines_to_keep: CodeLoss | None = None
        """The lines of a function that may have ended."""
        self._next = 0.0

    def see(self, model: torch.nn.Module, args: Any, kwargs: Any, is_new: bool) -> None:
        """Note a call of a model; `is_new` says whether its shapes are new."""
        arguments = tensors_in((args, kwargs or {}))
        self._arguments = [weakref.ref(tensor) for tensor in arguments]
        if not is_new:
            return
        frame = sys._getframe(1)
        self._place, self._lines_to_keep, self._model = call_site(frame), None, None
        if self._place is not None and self._place.is_in_function and time.monotonic() >= self._next:
            self._next = time.monotonic() + _SECONDS
            self._keep(returned_loss(frame, model, arguments))
            self._model = weakref.ref(model) if self._lines_to_keep is None else None

    def before_update(self) -> None:
        """Look for the lines of the last call, if its function still runs."""
        model = None if self._model is None else self._model()
        self._model = None
        if model is not None:
            self._keep(self._in_stack(model))

    def _keep(self, code: CodeLoss | None) -> None:
        self._lines_to_keep = None if code is None or _holds_tensors(code) else code

    def _in_stack(self, model: torch.nn.Module) -> CodeLoss | None:
        # In place of an argument that is gone stands an object that no variable is.
        arguments: list[Any] = [ref() if ref() is not None else object() for ref in self._arguments]
        return None if self._place is None else loss_in_loop(sys._getframe(2), self._place, model, arguments)

    def code(self, model: torch.nn.Module) -> CodeLoss | None:
        """Return the lines for the last call of a model; None where they are not understood."""
        return self._in_stack(model) or self._lines_to_keep


def _holds_tensors(code: CodeLoss) -> bool:
    """Return whether values may hold tensors, as a criterion with weights does."""
    for value in code.values.values():
        if isinstance(value, torch.nn.Module):
            if next(value.parameters(), None) is not None or next(value.buffers(), None) is not None:
                return True
        elif callable(value) and not isinstance(value, FunctionType | type) and not inspect.isbuiltin(value):
            return True
    return False
