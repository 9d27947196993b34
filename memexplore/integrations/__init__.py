"""Watching the runs of other libraries' training loops with one line.

    Trainer(..., callbacks=[TransformersCallback(folder="run")])        transformers
    Trainer(..., callbacks=[LightningCallback(first=5)])                Lightning, both package names
    with watch_accelerator(accelerator) as live: ...                    a loop with accelerate

Each calls `memexplore.watch` with the model and the optimizer of the run, and takes its options. The libraries are
imported when their name here is used first.

- `fits`: what the callbacks share; it ends a fit that the trainer does not end. `transformers_trainer`,
  `lightning_trainer` and `accelerate_loop`: one library each.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from memexplore.integrations.accelerate_loop import watch_accelerator
    from memexplore.integrations.lightning_trainer import LightningCallback
    from memexplore.integrations.transformers_trainer import TransformersCallback

_HOMES = {
    "LightningCallback": "lightning_trainer",
    "TransformersCallback": "transformers_trainer",
    "watch_accelerator": "accelerate_loop",
}

__all__ = ["LightningCallback", "TransformersCallback", "watch_accelerator"]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'memexplore.integrations' has no attribute {name!r}")
    value = getattr(importlib.import_module(f"memexplore.integrations.{_HOMES[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(set(globals()) | set(__all__))
