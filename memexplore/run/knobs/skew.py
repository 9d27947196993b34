"""The knob `skew`: how unevenly a router with unknown scores chooses its experts."""

from __future__ import annotations

import enum
from collections.abc import Iterator
from typing import Any

from memexplore.run.knobs.control import Explored
from memexplore.run.knobs.knob import Group, Knob, ModelCode, Stage
from memexplore.run.knobs.values import OneOf
from memexplore.run.machine import Machine
from memexplore.virtual_gpu.values import choices


class Skew(enum.Enum):
    """How many rows of unknown scores, such as tokens, choose the same candidates, such as experts."""

    AS_WRITTEN = "as written"
    HALF = "half"
    ALL = "all"


_SHARES = {Skew.AS_WRITTEN: 0.0, Skew.HALF: 0.5, Skew.ALL: 1.0}


class SkewKnob(Knob):
    """How many tokens a virtual GPU sends to the same experts, where routing depends on unknown values."""

    name = "skew"
    values = OneOf(Skew)
    place = 127
    group = Group.MODEL
    locked = "A loop that runs has the routing of its own data."
    stage = Stage.GPU

    def phrase(self, value: Any) -> str:
        """Return how many tokens get the same experts."""
        return f"{value.value} of the tokens to the same experts"

    def option(self, value: Any) -> str:
        """Return how many tokens get the same experts."""
        return {Skew.AS_WRITTEN: "even"}.get(value, self.values.text(value))

    def model_lines(self, value: Any, code: ModelCode) -> Iterator[str]:
        """Yield a comment: the data decides, and no code."""
        yield f"# For data that sends {self.phrase(value)}."

    def on_machine(self, value: Any, machine: Machine) -> Machine:
        """Return the machine on which so many rows of unknown scores choose the same candidates."""
        return machine.twin().replace(skew=_SHARES[value])

    def hidden(self, explored: Explored) -> str:
        """Return that no expert, token or class is chosen by unknown scores."""
        notes = () if explored.tape is None else explored.tape.meta.notes
        return "" if choices.were_made(notes) else "nothing is chosen by unknown scores"
