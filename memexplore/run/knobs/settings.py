"""The knob `settings`: settings of the caching allocator."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from memexplore.allocator import Settings
from memexplore.run.knobs.control import Control, Explored, Option
from memexplore.run.knobs.knob import Group, Knob, Stage, Untouched
from memexplore.run.knobs.values import Text
from memexplore.run.machine import Kind, Machine

if TYPE_CHECKING:
    from memexplore.hardware.catalogue import Gpu
    from memexplore.run.knobs.knobs import Knobs

_OPTION = re.compile(r"([^,\[:]+):([^,\[]+|\[[^\]]*\])")
_OPTIONS = {
    "expandable_segments": ("Expandable segments", "switch", [Option("off", ""), Option("on", "True")]),
    "max_split_size_mb": (
        "Max split size",
        "choice",
        [Option("unlimited", ""), *(Option(f"{size} MiB", str(size)) for size in (20, 32, 64, 128, 256, 512, 1024))],
    ),
    "roundup_power2_divisions": (
        "Roundup divisions",
        "choice",
        [Option("off", ""), *(Option(f"{count} steps", str(count)) for count in (2, 4, 8, 16))],
    ),
    "garbage_collection_threshold": (
        "Collection threshold",
        "choice",
        [Option("off", ""), *(Option(f"{percent} %", f"{percent / 100:g}") for percent in range(50, 100, 10))],
    ),
}
"""Name of a setting -> label, kind and positions of its control."""


class SettingsKnob(Knob):
    """Settings of the caching allocator, as in `PYTORCH_CUDA_ALLOC_CONF`.

    They are of a whole process, in which other tensors live: a setting on a real GPU runs on the virtual one with
    its numbers. They hold whatever the program sets itself.
    """

    name = "settings"
    costs = "equal results"
    values = Text("max_split_size_mb:128", Settings.parse, "a text such as `expandable_segments:True`")
    place = 160
    group = Group.GPU
    saves_little = True
    leaves = Untouched.EVERYTHING
    locked = "The allocator reads its settings once in a process: set PYTORCH_CUDA_ALLOC_CONF and start again."
    stage = Stage.PROCESS
    adds_only_recomputation = True

    def phrase(self, value: Any) -> str:
        """Return the settings themselves."""
        return self.values.text(value)

    def on_machine(self, value: Any, machine: Machine) -> Machine:
        """Return the machine with another allocator."""
        if machine.kind is Kind.CPU:
            raise ValueError(
                "settings= are those of the allocator of a GPU, which a CPU does not have: name a GPU as well"
            )
        return machine.twin().with_settings(value)

    def controls(self, explored: Explored) -> list[Control]:
        """Return a control for each of the settings that matter most."""
        return [] if explored.machine is None else [self._control(name, *more) for name, more in _OPTIONS.items()]

    def _control(self, name: str, label: str, kind: str, options: list[Option]) -> Control:
        def value_of(knobs: Knobs) -> str:
            value = setting_of(knobs.settings, name)
            if kind == "switch":
                return "True" if value.lower() == "true" else ""
            return value

        return Control(
            f"{self.name} {name}",
            self,
            label,
            kind,
            lambda knobs, value: knobs.replace(settings=with_setting(knobs.settings, name, value)),
            value_of,
            lambda knobs: options,
        )

    def hidden(self, explored: Explored) -> str:
        """Return that a CPU has no such settings."""
        is_cpu = explored.machine is not None and explored.machine.kind is Kind.CPU
        return "a CPU has no caching allocator" if is_cpu else ""

    def candidates(self, explored: Explored, gpu: Gpu) -> Iterable[Any]:
        """Return expandable segments, which leave no gaps."""
        return ("expandable_segments:True",)


def setting_of(settings: str | None, name: str) -> str:
    """Return one option of a ``PYTORCH_CUDA_ALLOC_CONF`` string as text; empty if the string does not set it.

    >>> setting_of("max_split_size_mb:64,expandable_segments:True", "max_split_size_mb")
    '64'
    """
    return dict(_OPTION.findall((settings or "").replace(" ", ""))).get(name, "")


def with_setting(settings: str | None, name: str, value: str) -> str | None:
    """Return a ``PYTORCH_CUDA_ALLOC_CONF`` string with one option changed, or removed if the value is empty.

    >>> with_setting("expandable_segments:True", "max_split_size_mb", "64")
    'expandable_segments:True,max_split_size_mb:64'
    >>> with_setting("max_split_size_mb:64", "max_split_size_mb", "") is None
    True
    """
    options = dict(_OPTION.findall((settings or "").replace(" ", ""))) | {name: value}
    return ",".join(f"{name}:{value}" for name, value in options.items() if value) or None
