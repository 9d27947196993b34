"""A model and the random states as they were, whatever a run does to them."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Iterator

import numpy as np
import torch

from memexplore.torch_internals.modules import MODULE_TABLES


@contextlib.contextmanager
def attributes_kept(model: torch.nn.Module) -> Iterator[None]:
    """Have all modules of a model with the attributes, weights, buffers, layers and hooks that they had.

    >>> model = torch.nn.Linear(2, 2)
    >>> with attributes_kept(model):
    ...     model.seen, model.bias = 1, None
    >>> hasattr(model, "seen"), model.bias is None
    (False, False)
    """
    held = [
        (table, dict(table))
        for module in model.modules()
        # The attributes last: the tables are among them.
        for table in (*(module.__dict__[name] for name in MODULE_TABLES if name in module.__dict__), module.__dict__)
    ]
    try:
        yield
    finally:
        for table, content in held:
            table.clear()
            table.update(content)


@contextlib.contextmanager
def random_states_kept() -> Iterator[None]:
    """Have the random states of Python and numpy as they were; those of torch are others' business."""
    states = random.getstate(), np.random.get_state()
    try:
        yield
    finally:
        random.setstate(states[0])
        np.random.set_state(states[1])
