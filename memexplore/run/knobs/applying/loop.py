"""The parts of a training loop that knobs change, and what a loop that runs already lets knobs change."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import torch


@dataclasses.dataclass
class Loop:
    """The parts of a training loop; `programs.training_loop` runs it."""

    samples: int
    """Samples of a batch."""
    input_size: int | None = None
    """Height of the images or length of the sequences, None as they are."""
    micro_batches: int = 1
    dtype: torch.dtype | None = None
    """Type of weights and of inputs that are floating-point numbers, None as they are."""
    memory_format: torch.memory_format | None = None
    """Memory format of images, None as they are."""
    around_forward: list[Callable[[str], contextlib.AbstractContextManager[Any]]] = dataclasses.field(
        default_factory=list
    )
    """Contexts of forward pass and loss, by the type of the device."""
    scales_loss: bool = False
    """Whether a `GradScaler` scales the loss, where the loop trains."""
    trains: bool = True
    """Whether there is a backward pass."""
    updates_in_backward: bool = False
    zero_gradients: bool = False
    """Whether `zero_grad` fills gradients with zeros instead of freeing them."""


class RunningLoop(NamedTuple):
    """What is known of a training loop that runs, whose knobs can be switched between two steps."""

    no_model: str = ""
    """Why the loop has no model that can be changed, as a sentence, "" if it has one."""
    follows: frozenset[str] = frozenset()
    """What the loop asks memexplore for, in the words of `Knob.asks_loop_for`."""
    layout_kept_by: str = ""
    """What needs the memory format of the weights as it is, "" if nothing does."""
