"""The knob `batch`: the number of samples of a step."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

from torch import nn

from memexplore.run.knobs.applying.loop import Loop
from memexplore.run.knobs.control import Control, Explored, counter, numbers
from memexplore.run.knobs.knob import Group, Knob, Limits, Stage
from memexplore.run.knobs.values import Number

if TYPE_CHECKING:
    from memexplore.run.knobs.knobs import Knobs


class BatchKnob(Knob):
    """Samples of a step, of all its micro-batches together; on several GPUs of each."""

    name = "batch"
    costs = "noisier gradients"
    values = Number()
    place = 40
    group = Group.BATCH
    is_primary = True
    locked = "The batch comes from the loop's data loader: change it there and start again."
    stage = Stage.BATCH

    def phrase(self, value: Any) -> str:
        """Return the number."""
        return f"batch of {value}"

    def change_loop(self, value: Any, loop: Loop) -> None:
        """Change the size of the batches."""
        loop.samples = value

    def written(self, explored: Explored) -> str:
        """Return the number of samples."""
        return str(explored.batch or "")

    def controls(self, explored: Explored) -> list[Control]:
        """Return a slider over powers of two; the micro-batches stay equal parts of the batch."""
        own = explored.batch
        if own is None:
            return []
        largest = max(own * 16, min(own * 64, 1024))
        powers = [2**power for power in range(largest.bit_length())]
        batches = numbers([own, *(power for power in powers if own / 64 <= power <= largest)])

        def with_batch(knobs: Knobs, value: int) -> Knobs:
            count = knobs.accumulation or 1
            # The largest number of equal micro-batches up to the present one.
            count = next(number for number in range(min(count, value), 0, -1) if value % number == 0)
            return knobs.replace(batch=None if value == own else value, accumulation=None if count == 1 else count)

        slider = counter(self, own, lambda knobs: batches, unit="samples", unit_of_one="sample", is_primary=True)
        return [dataclasses.replace(slider, updated=with_batch)]

    def unavailable(self, limits: Limits) -> str:
        """Return why there is one batch size only."""
        return limits.no_batch

    def alters_training(self, value: Any, model: nn.Module | None, knobs: Knobs) -> bool:
        """Return True."""
        return True

    def training_text(self, value: Any, knobs: Knobs) -> str:
        """Return what it means for the training."""
        return f"A step of {value} samples has a noisier gradient, and often needs another learning rate."
