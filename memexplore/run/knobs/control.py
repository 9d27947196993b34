"""The controls of an explorer: positions with their texts, and the `Knobs` that a position means."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple

from memexplore.run.knobs.values import AS_WRITTEN

if TYPE_CHECKING:
    import torch

    from memexplore.run.knobs.knob import Knob
    from memexplore.run.knobs.knobs import Knobs
    from memexplore.run.machine import Machine
    from memexplore.tape import Tape


class Explored(NamedTuple):
    """A program as it is written, as far as it is known, and the machine on which it is explored."""

    machine: Machine | None = None
    model: torch.nn.Module | None = None
    optimizer: torch.optim.Optimizer | None = None
    optimizer_name: str = ""
    """Class of the optimizer, where the optimizer itself is not known."""
    batch: int | None = None
    """Samples of a step."""
    input_size: int | None = None
    """Height of the images or length of the sequences."""
    are_images: bool = False
    tape: Tape | None = None
    variables: Mapping[str, tuple[list[Any], Any]] = MappingProxyType({})
    """Values of the sliders of a cell's variables, and the assigned value, None if it is not a literal."""


class Option(NamedTuple):
    """One position of a control."""

    label: str
    value: Any


@dataclasses.dataclass(frozen=True, eq=False)
class Control:
    """One control: how it shows a knob, and how it changes a setting."""

    name: str
    """Identifies the control in requests."""
    knob: Knob
    label: str
    kind: str
    """"slider", "choice", "switch", or "text" for names of layers."""
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
    other_group: str = ""
    """Title of its group in an explorer where that is not the knob's."""
    is_listed: Callable[[Knobs], bool] = lambda knobs: True
    """Whether a change of the control is named in the list of changes."""

    @property
    def field(self) -> str:
        """The name of the knob."""
        return self.knob.name

    @property
    def group(self) -> str:
        """Title of its group in an explorer."""
        return self.other_group or str(self.knob.group.value)

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
        """Return the option at an index, or by its label where the page has shown options of other knobs."""
        options = self.positions(knobs)
        named = [option for option in options if option.label == label]
        return named[0] if named else options[min(max(index, 0), len(options) - 1)]

    def text(self, knobs: Knobs) -> str:
        """Return the present value as text."""
        return self.value_of(knobs) if self.kind == "text" else self.positions(knobs)[self.index(knobs)].label

    def is_changed(self, knobs: Knobs) -> bool:
        """Return whether the value is another one than as written."""
        return bool(self.value_of(knobs) != self.value_of(type(knobs)()))

    def reset(self, knobs: Knobs) -> Knobs:
        """Return the knobs with the value as written."""
        return self.updated(knobs, self.value_of(type(knobs)()))

    def neighbours(self, knobs: Knobs) -> list[Knobs]:
        """Return the knobs with the next position of this control, and with the previous one."""
        options = self.positions(knobs)
        index = self.index(knobs)
        adjacent = [options[number] for number in (index + 1, index - 1) if options and 0 <= number < len(options)]
        return [self.updated(knobs, option.value) for option in adjacent]


def field_control(knob: Knob, kind: str, options_of: Callable[[Knobs], list[Option]], **more: Any) -> Control:
    """Return a control that has the name of a knob, and whose positions are its values."""
    return Control(
        knob.name,
        knob,
        knob.label,
        kind,
        lambda knobs, value: knobs.replace(**{knob.name: value}),
        lambda knobs: getattr(knobs, knob.name),
        options_of,
        **more,
    )


def choice(knob: Knob, texts: Mapping[Any, str], written: str, **more: Any) -> Control:
    """Return a list of the values of a knob; the first one is as written, whose text is `written` where it is known."""
    (first, _), *rest = texts.items()
    options = [written_option(first, written), *(Option(text, value) for value, text in rest)]

    def options_of(knobs: Knobs) -> list[Option]:
        value = getattr(knobs, knob.name)
        # What is written is listed a second time only while it is set, as by code.
        return [option for option in options if option.label != written or option.value == value]

    return field_control(knob, "choice", options_of, **more)


def written_option(value: Any, written: str) -> Option:
    """Return the option that changes nothing."""
    return Option(f"{written} ({AS_WRITTEN})" if written else AS_WRITTEN, value)


def counter(knob: Knob, written: int, options_of: Callable[[Knobs], list[Option]], **more: Any) -> Control:
    """Return a slider of numbers; None is the number that is written."""
    return Control(
        knob.name,
        knob,
        knob.label,
        "slider",
        lambda knobs, value: knobs.replace(**{knob.name: None if value == written else value}),
        lambda knobs: getattr(knobs, knob.name) or written,
        options_of,
        **more,
    )


def layer_names(knob: Knob) -> Control:
    """Return a text with the names of layers."""
    return Control(
        knob.name,
        knob,
        knob.label,
        "text",
        lambda knobs, text: knobs.replace(**{knob.name: tuple(text.split())}),
        lambda knobs: " ".join(getattr(knobs, knob.name)),
    )


def numbers(values: Iterable[int]) -> list[Option]:
    """Return numbers as options in ascending order, each once."""
    return [Option(str(value), value) for value in sorted(set(values))]
