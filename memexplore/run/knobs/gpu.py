"""The knob `gpu`: the GPU."""

from __future__ import annotations

from typing import Any

from memexplore.hardware import catalogue
from memexplore.run.knobs.control import Control, Explored, Option
from memexplore.run.knobs.knob import Group, Knob, Stage
from memexplore.run.knobs.values import AS_WRITTEN, Text
from memexplore.run.machine import Machine
from memexplore.text.units import size_text

_MEMORY_GROUPS = (
    (0, "up to 12 GB"),
    (14, "16 GB"),
    (21, "24 GB"),
    (28, "32 to 48 GB"),
    (50, "64 to 96 GB"),
    (105, "more than 96 GB"),
)
"""The least GiB of a group of the list, and its title."""


class GpuKnob(Knob):
    """The GPU, by its name in `memexplore gpus` or by its size; it is virtual."""

    name, word = "gpu", "GPU"
    values = Text("T4", catalogue.find, "a text such as `T4` or `24GiB`")
    place = 170
    group = Group.GPU
    is_primary = True
    locked = "The model is on its device: choose another one and start again."
    stage = Stage.GPU
    adds_only_recomputation = True

    def on_machine(self, value: Any, machine: Machine) -> Machine:
        """Return the machine with another GPU."""
        return machine.with_gpu(catalogue.find(value))

    def controls(self, explored: Explored) -> list[Control]:
        """Return a list of the catalogue; a real GPU, which is the initial one, comes first."""
        machine = explored.machine
        if machine is None:
            return []
        rows = [(str(key), int(capacity)) for key, capacity in catalogue.gpus()["capacity"].items()]
        initial = machine.key
        options = [Option(f"{key} · {size_text(capacity)}", key) for key, capacity in rows]
        groups: list[tuple[int, str]] = []
        for least, title in _MEMORY_GROUPS:
            first = next((number for number, (_, size) in enumerate(rows) if size >= least * 1024**3), None)
            if first is not None:
                groups.append((first, title))
        if initial not in dict(rows):
            options.insert(0, Option(initial if machine.is_virtual else machine.name, initial))
            groups = [(0, AS_WRITTEN), *((first + 1, title) for first, title in groups)]
        control = Control(
            self.name,
            self,
            self.label,
            "choice",
            lambda knobs, value: knobs.replace(gpu=None if value == initial else value),
            lambda knobs: catalogue.find(knobs.gpu).key if knobs.gpu else initial,
            lambda knobs: list(options),
            is_primary=True,
            groups=tuple(groups),
        )
        return [control]
