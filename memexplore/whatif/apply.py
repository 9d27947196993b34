"""Knobs onto a model, real or virtual, and off again."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch

from memexplore.whatif.knobs import Knobs


class LeftOut(NamedTuple):
    """A place that a knob left as it was, and why."""

    where: str
    reason: str


class Applied(NamedTuple):
    """What the knobs did to a model."""

    texts: tuple[str, ...] = ()
    """One phrase a knob, such as `Checkpointing 16 of 16 blocks`."""
    left_out: tuple[LeftOut, ...] = ()
    notes: tuple[str, ...] = ()
    """What a person has to know, one sentence each, such as that batch norm sees micro-batches."""

    def __add__(self, other: Any) -> Applied:
        return Applied(*(mine + its for mine, its in zip(self, other, strict=True)))


@contextlib.contextmanager
def apply(knobs: Knobs, model: torch.nn.Module) -> Iterator[Applied]:
    """Put knobs onto a model for the block, and take them off again."""
    yield Applied()
