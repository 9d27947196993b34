"""Compare the period that fails with those before it, without the weights and what belongs to them."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from memexplore.analysis.curves import Rows, block_bytes, cached_by_tape, lifetimes
from memexplore.analysis.periods import periods
from memexplore.out_of_memory.held_types import OF_MODEL
from memexplore.tape import Action, Category, Tape
from memexplore.text.tensor_text import shape_of

_LARGER = 1.25
"""Ratio from which a period is called larger: requests of equal periods may differ in a few temporaries."""


class Inputs(NamedTuple):
    """Shape and dtype of the largest input of a period, and of the largest one before it."""

    now: str
    before: str


class LargerPeriod(NamedTuple):
    """A failing period that is larger than those before it; sizes in bytes."""

    size: int
    """What it has allocated itself, with the failed request."""
    before: int
    """The most that an earlier period had so at a time."""
    unit: str
    """What a period is: "step" or "iteration"."""
    inputs: Inputs | None
    """None where its largest input is not larger."""

    @property
    def longer_inputs(self) -> Inputs | None:
        """Inputs whose samples are larger, not only more of them; else None.

        >>> LargerPeriod(40, 10, "step", Inputs("float32[8, 90]", "float32[8, 30]")).longer_inputs is not None
        True
        >>> LargerPeriod(40, 10, "step", Inputs("float32[8, 90]", "float32[4, 90]")).longer_inputs is not None
        False
        """
        if self.inputs is None:
            return None
        now, before = shape_of(self.inputs.now), shape_of(self.inputs.before)
        return None if now is None or before is None or now[1:] == before[1:] else self.inputs


@cached_by_tape
def larger_period(tape: Tape) -> LargerPeriod | None:
    """Return by how much the period that fails is larger than those before it; None if it is not.

    >>> from memexplore.tape import Meta, Source
    >>> A, F, O = (int(each) for each in (Action.ALLOC, Action.FREE_REQUESTED, Action.OOM))
    >>> rows = {"action": [A, F, A, F, A, O], "address": [0, 0, 0, 0, 0, -1],
    ...         "size": [1024, 1024, 2048, 2048, 4096, 8192], "step": [1, 1, 2, 2, 3, 3]}
    >>> larger_period(Tape.from_columns(rows, meta=Meta(Source.MEASURED, "cpu")))
    LargerPeriod(size=12288, before=2048, unit='step', inputs=None)

    Raises ValueError for a tape that is not placed.
    """
    ended = periods(tape)
    last = len(tape) - 1
    if not ended.ends or ended.ends[-1] >= last:
        return None
    own = _own_bytes(tape, ended.ends)
    first = ended.ends[-1] + 1
    size, before = int(own[last] + tape.size[last]), int(own[:first].max())
    if not before or size < _LARGER * before:
        return None
    return LargerPeriod(size, before, ended.unit, _larger_inputs(tape, first))


def _own_bytes(tape: Tape, ends: list[int]) -> Rows:
    """Return after each row the bytes that are allocated and were requested in the same period."""
    life = lifetimes(tape)
    own = (tape.action[life.born] == Action.ALLOC) & ~np.isin(tape.category[life.born], OF_MODEL)
    born, freed = life.born[own], life.requested[own]
    next_period = np.append(np.array(ends, dtype=np.int64) + 1, len(tape))
    freed = np.minimum(freed, next_period[np.searchsorted(ends, born)])
    changes = np.zeros(len(tape) + 1, dtype=np.int64)
    sizes = block_bytes(tape)[born]
    np.add.at(changes, born, sizes)
    np.subtract.at(changes, freed, sizes)
    return np.cumsum(changes[:-1])


def _larger_inputs(tape: Tape, first: int) -> Inputs | None:
    inputs = np.flatnonzero((tape.category == Category.INPUT) & (tape.tensor >= 0))
    before, now = inputs[inputs < first], inputs[inputs >= first]
    if not len(before) or not len(now):
        return None
    largest, largest_before = (int(rows[np.argmax(tape.size[rows])]) for rows in (now, before))
    if tape.size[largest] <= tape.size[largest_before]:
        return None
    return Inputs(tape.tensor_texts[tape.tensor[largest]], tape.tensor_texts[tape.tensor[largest_before]])
