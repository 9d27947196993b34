"""Keep the activation bytes of layers, step by step, in bounded memory, as an array of layers × steps."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import pandas

CAPACITY = 512


class LayerHistory:
    """Bytes of activations of each layer when the model's call has ended, of at most `CAPACITY` steps.

    When there are more, of two neighbours the step with the larger sum stays.
    """

    def __init__(self, capacity: int = CAPACITY) -> None:
        self._capacity = capacity + capacity % 2
        self._columns: list[tuple[int, dict[int, int]]] = []
        self._width = 1
        """Steps that one column stands for."""
        self._waiting: list[tuple[int, dict[int, int]]] = []

    def add(self, step: int, sizes: Mapping[int, int]) -> None:
        """Add the bytes of a step by number of layer."""
        self._waiting.append((step, dict(sizes)))
        if len(self._waiting) >= self._width:
            self._columns.append(max(self._waiting, key=_sum))
            self._waiting = []
            if len(self._columns) >= self._capacity:
                pairs = zip(self._columns[::2], self._columns[1::2], strict=True)
                self._columns = [max(pair, key=_sum) for pair in pairs]
                self._width *= 2

    def columns(self) -> list[tuple[int, dict[int, int]]]:
        """Return steps and their bytes by number of layer, in order."""
        return [*self._columns, *self._waiting[-1:]]

    def table(self, names: Sequence[str]) -> pandas.DataFrame:
        """Return bytes by layer (rows, by name) and step (columns); layers that keep nothing are left out.

        >>> history = LayerHistory()
        >>> history.add(1, {0: 8, 1: 0})
        >>> history.add(2, {0: 16})
        >>> history.table(["fc", "act"]).loc["fc"].tolist()
        [8, 16]
        """
        import pandas

        columns = self.columns()
        numbers = [number for number in range(len(names)) if any(sizes.get(number) for _, sizes in columns)]
        data = {step: [sizes.get(number, 0) for number in numbers] for step, sizes in columns}
        frame = pandas.DataFrame(data, index=pandas.Index([names[number] for number in numbers], name="layer"))
        frame.columns.name = "step"
        return frame


def _sum(column: tuple[int, dict[int, int]]) -> int:
    return sum(column[1].values())
