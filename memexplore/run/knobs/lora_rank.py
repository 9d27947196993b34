"""The knob `lora_rank`: the rank of adapters."""

from __future__ import annotations

from typing import TYPE_CHECKING

from memexplore.run.knobs.control import Control, Explored, field_control, numbers
from memexplore.run.knobs.knob import Group, Knob, Stage
from memexplore.run.knobs.values import Number

if TYPE_CHECKING:
    from memexplore.run.knobs.knobs import Knobs


class LoraRankKnob(Knob):
    """The rank of the adapters of `lora`."""

    name, word = "lora_rank", "LoRA rank"
    costs = "another training"
    part_of = "lora"
    values = Number(8)
    place = 150
    group = Group.LAYERS
    stage = Stage.WEIGHTS

    def controls(self, explored: Explored) -> list[Control]:
        """Return a slider over powers of two."""
        ranks = numbers(2**power for power in range(9))
        return [field_control(self, "slider", lambda knobs: ranks)]

    def not_now(self, knobs: Knobs) -> str:
        """Return that adapters come first."""
        return "" if knobs.lora else "No layer has LoRA"
