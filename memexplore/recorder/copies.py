"""Find copies of parameters, as averaged models (SWA, EMA), reference models and checkpoints hold them.

A block whose values are copies of parameters, buffers, gradients or optimizer states, or a mean of them, has their
category.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from memexplore.recorder.events import Ref
from memexplore.tape import Category
from memexplore.torch_internals.tensors import storage_key, untyped_storage

_ATEN = torch.ops.aten
COPY = _ATEN.copy_.default
COPYING = frozenset(
    {
        _ATEN.clone.default,
        _ATEN._to_copy.default,
        _ATEN.cat.default,
        _ATEN.stack.default,
        # Means of weights that are computed out of place: decay * average + (1 - decay) * weight.
        _ATEN.mul.Tensor,
        _ATEN.mul.Scalar,
        _ATEN.add.Tensor,
        _ATEN.sub.Tensor,
        _ATEN.div.Tensor,
        _ATEN.lerp.Scalar,
        _ATEN.lerp.Tensor,
    }
)
"""Ops whose result is a copy or a mean of their arguments, if it is as large as they are."""
_KINDS = (Category.PARAMETER, Category.BUFFER, Category.OPTIMIZER_STATE, Category.GRADIENT)
"""Categories that a copy inherits; of several sources the first in this order."""


class Copies:
    """Rows of blocks, and the rows that their values come from."""

    def __init__(self, live: Mapping[int, Ref], open_rows: Mapping[int, int]) -> None:
        self._live, self._open_rows = live, open_rows
        self._sources: dict[int, tuple[int, ...]] = {}
        self._targets: dict[int, int] = {}
        """Row of a block -> row of the block that `copy_` copied it into."""

    def computed(self, row: int, args: Any, size: int) -> None:
        """Note that a new block of `size` bytes was computed from the first arguments of an op."""
        parts = args[0] if isinstance(args[0], list | tuple) else args[:2]
        sources = [value for value in parts if isinstance(value, torch.Tensor) and value.dim()]
        # A copy may have half or a quarter of the bytes: float32 to bfloat16 or int8.
        fits = [size * 4 >= value.numel() * value.element_size() for value in sources]
        self._sources[row] = tuple(self._row(value) if fit else -1 for value, fit in zip(sources, fits, strict=True))

    def copied(self, into: torch.Tensor, value: torch.Tensor) -> None:
        """Note that `copy_` copies a tensor into another one."""
        target, source = self._row(into), self._row(value)
        if target >= 0 and source >= 0 and target != source:
            self._sources.setdefault(target, (source,))
            self._targets[source] = target

    def _row(self, tensor: torch.Tensor) -> int:
        """The row of the block of a tensor, -1 for a tensor that is not on the device or not recorded yet."""
        try:
            ref = self._live.get(storage_key(untyped_storage(tensor)))
        except NotImplementedError:
            return -1
        return -1 if ref is None else self._open_rows.get(ref.address, -1)

    def renumber(self, new_row: Callable[[int], int]) -> None:
        """Change the numbers of all rows."""
        self._sources = {new_row(row): tuple(map(new_row, rows)) for row, rows in self._sources.items()}
        self._targets = {new_row(source): new_row(target) for source, target in self._targets.items()}

    def inherited(self, certain: Mapping[int, Category]) -> dict[int, tuple[Category, int]]:
        """Return for each copy its category, and the row of the block that it is a copy of.

        `certain` has the categories of the blocks whose category is certain.

        >>> from types import SimpleNamespace
        >>> weight = torch.zeros(4)
        >>> ref = SimpleNamespace(address=0)
        >>> copies = Copies({storage_key(weight.untyped_storage()): ref}, {0: 2})  # its block is of row 2
        >>> copies.computed(5, (weight,), size=16)
        >>> {row: kind.text for row, (kind, _) in copies.inherited({2: Category.PARAMETER}).items()}
        {5: 'parameter'}
        """
        copies: dict[int, tuple[Category, int]] = {}

        def kind(row: int) -> Category | None:
            known = certain.get(row)
            return known if known is not None else copies[row][0] if row in copies else None

        waiting = sorted(self._sources) + sorted(self._targets)
        while waiting:
            undecided = []
            for row in waiting:
                if kind(row) is not None:
                    continue
                origins = [self._sources[row]] if row in self._sources else []
                origins += [(self._targets[row],)] if row in self._targets else []
                for rows in origins:
                    kinds = [kind(source) for source in rows]
                    if kinds and all(source_kind in _KINDS for source_kind in kinds):
                        best = min(range(len(rows)), key=lambda number: _KINDS.index(kinds[number]))  # type: ignore[arg-type]
                        chosen = kinds[best]
                        assert chosen is not None
                        copies[row] = (chosen, rows[best])
                        break
                else:
                    undecided.append(row)
            if len(undecided) == len(waiting):
                break
            waiting = undecided
        return copies
