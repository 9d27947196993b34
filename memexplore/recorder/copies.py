"""Copies of parameters, as averaged models (SWA, EMA), reference models and checkpoints hold them.

In: which blocks an op computed from which others. Out: the category of each block whose values are those of parameters,
buffers, gradients or optimizer states, or a mean of them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch

from memexplore.tape import Category

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

    def __init__(self) -> None:
        self._sources: dict[int, tuple[int, ...]] = {}
        self._targets: dict[int, int] = {}
        """Row of a block -> row of the block that `copy_` copied it into."""

    def computed(self, row: int, sources: Iterable[int]) -> None:
        """Note that a new block was computed from other blocks and nothing else."""
        self._sources[row] = tuple(sources)

    def copied(self, target: int, source: int) -> None:
        """Note that `copy_` copied a block into another one."""
        if target >= 0 and source >= 0 and target != source:
            self._sources.setdefault(target, (source,))
            self._targets[source] = target

    def renumber(self, new_row: Mapping[int, int]) -> None:
        """Change the numbers of all rows."""
        self._sources = {new_row[row]: tuple(new_row[one] for one in rows) for row, rows in self._sources.items()}
        self._targets = {new_row[source]: new_row[target] for source, target in self._targets.items()}

    def inherited(self, certain: Mapping[int, Category]) -> dict[int, tuple[Category, int]]:
        """Return for each copy its category, and the row of the block that it is a copy of.

        `certain` has the categories of the blocks whose category is certain.

        >>> copies = Copies()
        >>> copies.computed(5, [2])
        >>> copies.computed(7, [5, 2])
        >>> copies.copied(2, 9)  # a loaded checkpoint
        >>> {row: kind.text for row, (kind, _) in copies.inherited({2: Category.PARAMETER}).items()}
        {5: 'parameter', 7: 'parameter', 9: 'parameter'}
        """
        found: dict[int, tuple[Category, int]] = {}

        def kind(row: int) -> Category | None:
            known = certain.get(row)
            return known if known is not None else found[row][0] if row in found else None

        waiting = sorted(self._sources) + sorted(self._targets)
        while waiting:
            undecided = []
            for row in waiting:
                if kind(row) is not None:
                    continue
                origins = [self._sources[row]] if row in self._sources else []
                origins += [(self._targets[row],)] if row in self._targets else []
                for rows in origins:
                    kinds = [kind(one) for one in rows]
                    if kinds and all(one in _KINDS for one in kinds):
                        best = min(range(len(rows)), key=lambda number: _KINDS.index(kinds[number]))  # type: ignore[arg-type]
                        chosen = kinds[best]
                        assert chosen is not None
                        found[row] = (chosen, rows[best])
                        break
                else:
                    undecided.append(row)
            if len(undecided) == len(waiting):
                break
            waiting = undecided
        return found
