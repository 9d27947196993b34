"""The knob `variables`: values of variables of a notebook cell."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping
from typing import TYPE_CHECKING, Any

from memexplore.run.knobs.control import Control, Explored, Option
from memexplore.run.knobs.knob import Group, Knob
from memexplore.run.knobs.values import AS_WRITTEN

if TYPE_CHECKING:
    from memexplore.run.knobs.knobs import Knobs


class Assignments:
    """Variables with their values, as pairs or a dict; a dict is sorted by name."""

    default: tuple[tuple[str, Any], ...] = ()
    examples = ((("size", 4),),)
    listed = "variables with values, such as `{'batch_size': 16}`"

    def parsed(self, name: str, value: Any) -> tuple[tuple[str, Any], ...]:
        """Return the pairs."""
        pairs = list(value.items() if isinstance(value, Mapping) else value if isinstance(value, Iterable) else [value])
        for pair in pairs:
            if not isinstance(pair, tuple | list) or len(pair) != 2 or not isinstance(pair[0], str):
                raise ValueError(f"{name}={value!r} is not variables with values; write {name}={{'name': value}}")
            if not isinstance(pair[1], Hashable):
                raise ValueError(f"{name}: {pair[0]} = {pair[1]!r} is not hashable; give a number, a text or a tuple")
        assigned = tuple((variable, assigned_value) for variable, assigned_value in pairs)
        return tuple(sorted(assigned, key=lambda pair: pair[0])) if isinstance(value, Mapping) else assigned

    def text(self, value: Any) -> str:
        """Return the assignments."""
        return ", ".join(f"{variable} = {assigned!r}" for variable, assigned in value) or AS_WRITTEN

    def code(self, value: Any) -> str:
        """Return the pairs in Python."""
        return repr(value)


class VariablesKnob(Knob):
    """Values of variables that a notebook cell assigns."""

    name = "variables"
    values = Assignments()
    place = 230
    group = Group.VARIABLES
    is_primary = True
    locked = "Variables belong to a notebook cell: run the cell again with other values."

    def text(self, value: Any) -> str:
        """Return the assignments alone."""
        return self.values.text(value)

    def phrase(self, value: Any) -> str:
        """Return the assignments alone."""
        return self.values.text(value)

    def controls(self, explored: Explored) -> list[Control]:
        """Return a slider for each variable, also with a position for what the cell assigns."""
        return [self._slider(name, *more) for name, more in explored.variables.items()]

    def _slider(self, name: str, values: list[Any], assigned: Any) -> Control:
        written = AS_WRITTEN if assigned is None else assigned

        def updated(knobs: Knobs, value: Any) -> Knobs:
            others = {variable: setting for variable, setting in knobs.variables if variable != name}
            return knobs.replace(variables=others if value == written else {**others, name: value})

        positions = [written, *(value for value in values if value != written)]
        if isinstance(assigned, int | float):
            positions.sort()
        options = [Option(f"{value:g}" if isinstance(value, float) else str(value), value) for value in positions]
        return Control(
            f"{self.name} {name}",
            self,
            name,
            "slider",
            updated,
            lambda knobs: dict(knobs.variables).get(name, written),
            lambda knobs: list(options),
            is_primary=True,
        )

    def training_text(self, value: Any, knobs: Knobs) -> str:
        """Return what it means for the training."""
        values = ", ".join(f"{name} = {assigned}" for name, assigned in value)
        return f"With {values} the gradient of a step is noisier, which often needs another learning rate."
