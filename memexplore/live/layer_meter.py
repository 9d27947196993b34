"""Measure the bytes that each layer keeps for backward, at the borders of module calls.

The counter of the device is read when a call begins and when it ends; what is left of the difference without the calls
inside belongs to the layer. Reading costs time, so the layers are measured in as many steps as fit into `SHARE`. Of
micro-batches, whose activations are freed before the next begins, the micro-batch with the most bytes counts.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from memexplore.live.hook_cost import call_cost
from memexplore.recorder.module_hooks import Names

SHARE = 0.01
"""Share of the watched time that measuring layers may take."""
_MOST_MODULES = 100_000


class LayerMeter:
    """Measures the layers of the steps that it names; without a counter it measures none."""

    def __init__(self, names: Names, allocated: Callable[[], int] | None) -> None:
        self._names, self._allocated = names, allocated
        self._ids: dict[int, int] = {}
        """Id of a module -> number of its name."""
        self._calls: list[list[int]] = []
        """Open calls: number of the layer, bytes at the begin, bytes kept by calls inside."""
        self._kept: dict[int, int] = {}
        self._most: dict[int, int] = {}
        """The bytes of an earlier micro-batch."""
        self._begin = self._end = 0
        """Bytes allocated when the first call of a micro-batch began and when the last one ended."""
        self._count = 0
        self._credit = 0.0
        self._cost = 0.0
        """Seconds that measuring took in the step that was measured last."""
        self.is_open = False
        """Whether a call of a model with gradients is being measured."""
        self.seconds = 0.0
        """Seconds that measuring took in all."""

    def adopt(self, model: Any) -> None:
        """Number the modules of a model that is watched."""
        if len(self._ids) > _MOST_MODULES:
            self._ids.clear()
        self._names.root(model)
        for module in model.modules():
            self._ids[id(module)] = self._names.number(module, -1)

    def number(self, module: Any) -> int:
        """Return the number of a module, -1 if it is not watched."""
        return self._ids.get(id(module), -1)

    def is_due(self) -> bool:
        """Return whether the layers of the next step are measured."""
        return self._allocated is not None and self._credit >= self._cost

    def open(self) -> None:
        """Begin to measure the call of a model."""
        now = self._allocated()  # type: ignore[misc]
        if not self._kept or now - self._begin < (self._end - self._begin) / 2:
            self._next_micro_batch()
            self._begin = now
        self.is_open = True
        self._calls.clear()

    def _next_micro_batch(self) -> None:
        self._most = max(self._most, self._kept, key=lambda kept: sum(kept.values()))
        self._kept = {}

    def close(self) -> None:
        """End the call of a model."""
        if self.is_open:
            self._end = self._allocated()  # type: ignore[misc]
        self.is_open = False

    def begin(self, module: Any) -> None:
        """Note that the call of a layer begins."""
        number = self._ids.get(id(module), -1)
        if (in_parent := self._names.in_parent) and self._calls:
            number = in_parent.get((number, self._calls[-1][0]), number)
        self._calls.append([number, self._allocated(), 0])  # type: ignore[misc]

    def end(self) -> None:
        """Note that the call of the innermost layer ends."""
        if not self._calls:
            return
        number, before, inside = self._calls.pop()
        kept = self._allocated() - before  # type: ignore[misc]
        self._count += 1
        # A container may free what a layer inside returned: that was kept at the end of the call inside.
        if number >= 0 and kept > inside:
            self._kept[number] = self._kept.get(number, 0) + kept - inside
        if self._calls:
            self._calls[-1][2] += kept

    def take(self, seconds: float) -> dict[int, int]:
        """Return the bytes by number of layer of a step that took `seconds`, empty if it was not measured."""
        self._credit += SHARE * seconds
        self._next_micro_batch()
        kept, self._most = self._most, {}
        if self._count:
            self._cost = self._count * (call_cost() + 2 * self._read_cost())
            self._credit = min(self._credit, self._cost) - self._cost
            self.seconds += self._cost
            self._count = 0
        return kept

    def _read_cost(self) -> float:
        began = time.perf_counter()
        for _ in range(5):
            self._allocated()  # type: ignore[misc]
        return (time.perf_counter() - began) / 5
