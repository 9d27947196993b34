"""The knob `input_size`: height and width of images, or the length of sequences."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from torch import nn

from memexplore.run.knobs.applying.loop import Loop
from memexplore.run.knobs.control import Control, Explored, counter, numbers
from memexplore.run.knobs.knob import Estimate, Group, Knob, Stage, Untouched
from memexplore.run.knobs.values import Number

if TYPE_CHECKING:
    from memexplore.hardware.catalogue import Gpu
    from memexplore.run.knobs.knobs import Knobs


class InputSizeKnob(Knob):
    """Height and width of images, or length of sequences."""

    name = "input_size"
    costs = "other data"
    values = Number()
    place = 90
    group = Group.BATCH
    leaves = Untouched.ALL_BUT_ACTIVATIONS
    needs_step = "{} makes its own inputs"
    locked = "The size of the inputs comes from the loop's data loader: change it there and start again."
    stage = Stage.BATCH

    def change_loop(self, value: Any, loop: Loop) -> None:
        """Change the size of the inputs."""
        loop.input_size = value

    def written(self, explored: Explored) -> str:
        """Return the size."""
        return str(explored.input_size or "")

    def controls(self, explored: Explored) -> list[Control]:
        """Return a slider over multiples of a quarter of the size of images, or powers of two for sequences."""
        size = explored.input_size
        if size is None:
            return []
        powers = [2**power for power in range(20) if size / 16 <= 2**power <= size * 8]
        quarters = [max(size * quarter // 4, 1) for quarter in range(1, 9)]
        sizes = numbers(quarters if explored.are_images else [size, *powers])
        unit = "pixels" if explored.are_images else "tokens"
        return [counter(self, size, lambda knobs: sizes, unit=unit)]

    def hidden(self, explored: Explored) -> str:
        """Return that the inputs have no size."""
        has_no_size = explored.batch is not None and explored.input_size is None
        return "this batch has neither images nor sequences" if has_no_size else ""

    def alters_training(self, value: Any, model: nn.Module | None, knobs: Knobs) -> bool:
        """Return True."""
        return True

    def training_text(self, value: Any, knobs: Knobs) -> str:
        """Return what it means for the training."""
        return f"Inputs are cut or scaled to a size of {value}."

    def candidates(self, explored: Explored, gpu: Gpu) -> Iterable[Any]:
        """Return smaller sizes."""
        return () if explored.input_size is None else smaller_input_sizes(explored.input_size)

    def estimate(self, value: Any, estimate: Estimate) -> None:
        """Take less time and activations."""
        if estimate.input_size:
            estimate.time = value / estimate.input_size
            estimate.activations *= estimate.time


def smaller_input_sizes(size: int) -> tuple[int, ...]:
    """Return about three quarters and half of a size, as multiples of its common divisor with 32.

    >>> smaller_input_sizes(224)
    (160, 128)
    """
    grain = math.gcd(size, 32)
    rounded = (max(1, int(size * share / grain + 0.5)) * grain for share in (0.75, 0.5))
    return tuple(dict.fromkeys(smaller for smaller in rounded if smaller < size))
