"""One control of an explorer as a value: its positions, its text, and the `Knobs` that a position means."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

from memexplore.knobs.knobs import Knobs


class Option(NamedTuple):
    """One position of a knob."""

    label: str
    value: Any


@dataclasses.dataclass(frozen=True, eq=False)
class Knob:
    """One control: how it shows a field of `Knobs`, and how it changes it."""

    name: str
    """Identifies the control in requests."""
    field: str
    """The field of `Knobs`."""
    label: str
    group: str
    kind: str
    """"slider", "choice", "switch" or "text"."""
    updated: Callable[[Knobs, Any], Knobs]
    """Returns the knobs with a value. Raises ValueError if the value is not a setting."""
    value_of: Callable[[Knobs], Any]
    options_of: Callable[[Knobs], list[Option]] = lambda knobs: []
    unit: str = ""
    unit_of_one: str = ""
    """The unit behind a 1, `unit` if empty."""
    is_primary: bool = False
    groups: tuple[tuple[int, str], ...] = ()
    """First position and title of each group of options."""

    def positions(self, knobs: Knobs) -> list[Option]:
        """Return the options for some knobs; the present value is among them."""
        options, value = self.options_of(knobs), self.value_of(knobs)
        if self.kind == "text" or value in [option.value for option in options]:
            return options
        added = [*options, Option(str(value), value)]
        if all(isinstance(option.value, int | float) for option in added):
            return sorted(added, key=lambda option: option.value)
        return added

    def impossible(self, knobs: Knobs, reason_of: Callable[[Knobs], str]) -> list[str]:
        """Return for each position why it cannot be chosen; an empty list if all can.

        `reason_of` returns why a setting contradicts itself. A position is not to blame for the present contradiction.
        """
        if self.kind != "choice" or reason_of(knobs):
            return []
        value = self.value_of(knobs)
        reasons = []
        for option in self.positions(knobs):
            try:
                reasons.append("" if option.value == value else reason_of(self.updated(knobs, option.value)))
            except ValueError:
                reasons.append("")  # choosing it says what to do
        return reasons if any(reasons) else []

    def index(self, knobs: Knobs) -> int:
        """Return the position of the present value, -1 for a text."""
        if self.kind == "text":
            return -1
        return [option.value for option in self.positions(knobs)].index(self.value_of(knobs))

    def position(self, knobs: Knobs, index: int, label: str | None = None) -> Option:
        """Return the option at an index; the one with a label, where the page has shown options of other knobs."""
        options = self.positions(knobs)
        named = [option for option in options if option.label == label]
        return named[0] if named else options[min(max(index, 0), len(options) - 1)]

    def text(self, knobs: Knobs) -> str:
        """Return the present value as text."""
        return self.value_of(knobs) if self.kind == "text" else self.positions(knobs)[self.index(knobs)].label

    def is_changed(self, knobs: Knobs) -> bool:
        """Return whether the value is another one than as written."""
        return bool(self.value_of(knobs) != self.value_of(Knobs()))

    def reset(self, knobs: Knobs) -> Knobs:
        """Return the knobs with the value as written."""
        return self.updated(knobs, self.value_of(Knobs()))

    def neighbours(self, knobs: Knobs) -> list[Knobs]:
        """Return the knobs with the next position of this control, and with the previous one."""
        options = self.positions(knobs)
        index = self.index(knobs)
        adjacent = [options[number] for number in (index + 1, index - 1) if options and 0 <= number < len(options)]
        return [self.updated(knobs, option.value) for option in adjacent]


def numbers(values: Iterable[int]) -> list[Option]:
    """Return numbers as options in ascending order, each once."""
    return [Option(str(value), value) for value in sorted(set(values))]
