"""What became of knobs: words for what they did, the places they left out, and what a person has to know."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple


class LeftOut(NamedTuple):
    """A place that a knob left as it was, and why."""

    where: str
    reason: str


class Applied(NamedTuple):
    """What the knobs did to a model.

    >>> Applied(("bf16 autocast",)) + Applied(("channels last",))
    Applied(texts=('bf16 autocast', 'channels last'), left_out=(), notes=(), later=())
    """

    texts: tuple[str, ...] = ()
    """One phrase a knob, such as `Checkpointing 16 of 16 blocks`."""
    left_out: tuple[LeftOut, ...] = ()
    notes: tuple[str, ...] = ()
    """What a person has to know, one sentence each, such as that batch norm sees micro-batches."""
    later: tuple[Callable[[Applied], Applied], ...] = ()
    """What only a run can tell, such as that a block was never called; `settled` asks."""

    def __add__(self, other: Any) -> Applied:
        return Applied(*(mine + its for mine, its in zip(self, other, strict=True)))

    def settled(self) -> Applied:
        """The same when the model has run, with what the run told; it holds plain values only."""
        told = self._replace(later=())
        for tell in self.later:
            told = tell(told)
        return told
