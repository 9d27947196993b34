"""Watched models that run compiled code: models go in, whether their steps get no hooks and no recording comes out."""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn

from memexplore.live.store import Store
from memexplore.torch_internals.modules import is_compiled, is_compiled_outside

COMPILED = (
    "The model is compiled: its steps are watched, but none is recorded completely, because recording would make the "
    "compiler compile it again."
)


class CompiledModels:
    """The compiled ones among the watched models. A note says that none of their steps is recorded."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._is_open = False
        """Whether the loop may call a model, or the module that `torch.compile` has returned around it."""

    def are_run(self, models: Sequence[nn.Module]) -> bool:
        """Return whether models run compiled code, or may run it in the first step."""
        is_known = any(map(is_compiled, models))
        self._is_open = not is_known and any(map(is_compiled_outside, models))
        if is_known:
            self._store.note(COMPILED)
        return is_known or self._is_open

    def are_still_run(self, calls: int) -> bool:
        """Return the same after a step with this number of calls of the models themselves."""
        if self._is_open:
            self._is_open = False
            if calls:
                return False
            self._store.note(COMPILED)
        return True
