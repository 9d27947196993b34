"""Methods of torch that a watched run replaces: each calls the method it replaces, and notes the call."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from memexplore.live.watcher import Watcher
from memexplore.run.programs.packing import WATCHED_CALL
from memexplore.virtual_gpu.user_traceback import hide_own_frames


def noting_calls(call: Callable[..., Any], watcher: Watcher) -> Callable[..., Any]:
    """Return the `__call__` of a model's class, which also notes calls of the watched model."""

    @functools.wraps(call)
    def noting(self: Any, *args: Any, **kwargs: Any) -> Any:
        try:
            return watcher.call_model(call, self, args, kwargs)
        except torch.OutOfMemoryError as error:
            hide_own_frames(error)
            raise

    setattr(noting, WATCHED_CALL, call)
    return noting


def noting_skips(step: Callable[..., Any], watcher: Watcher) -> Callable[..., Any]:
    """Return `GradScaler.step`, which also notes that it did not call the optimizer's step."""

    @functools.wraps(step)
    def noting(self: Any, optimizer: Any, *args: Any, **kwargs: Any) -> Any:
        before = watcher.optimizer_calls
        try:
            result = step(self, optimizer, *args, **kwargs)
        except torch.OutOfMemoryError as error:
            hide_own_frames(error)
            raise
        if watcher.optimizer_calls == before:
            watcher.skipped(optimizer)
        return result

    return noting
