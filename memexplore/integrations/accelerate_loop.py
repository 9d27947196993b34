"""Watch the loop of an `Accelerator` in a block: `watch_accelerator`, for its prepared models and optimizers."""

from __future__ import annotations

import os
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

import torch

from memexplore.integrations.fits import missing

try:
    import accelerate
except ImportError as error:
    raise missing("accelerate", "accelerate") from error

if TYPE_CHECKING:
    from memexplore.live.live import Live
    from memexplore.run.programs.step import Step


def watch_accelerator(
    accelerator: accelerate.Accelerator,
    *,
    device: str | torch.device | None = None,
    first: int = 3,
    every: int | None = None,
    folder: str | os.PathLike[str] | None = None,
    step: Step | None = None,
) -> AbstractContextManager[Live]:
    """Watch the training steps of a block that trains with accelerate, as ``with watch_accelerator(accelerator):``.

    The block has the prepared loop. The options and the value of the block are those of `memexplore.watch`.

    Raises RuntimeError if the accelerator has prepared no model.
    """
    models = [accelerator.unwrap_model(model) for model in _prepared(accelerator, "_models")]
    if not models:
        raise RuntimeError("the accelerator has no model yet: call `accelerator.prepare(model, optimizer)` before")
    optimizers = _prepared(accelerator, "_optimizers")
    # Each of several may end a step.
    optimizer = optimizers[0] if len(optimizers) == 1 else None
    from memexplore.jupyter.watching import watch

    return watch(models, optimizer, device=device, first=first, every=every, folder=folder, step=step)


def _prepared(accelerator: Any, name: str) -> list[Any]:
    """Return what `accelerator.prepare` has wrapped; accelerate has no public name for it."""
    return list(getattr(accelerator, name, ()))
