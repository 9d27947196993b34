"""Assume which candidates an op chooses by unknown scores: a router's experts, a token, a class, an order.

The choices are indices that go round, so that all candidates are chosen equally often, none twice in a row, and no
choice is lost. A row `r` with `k` choices among `n` candidates has `first + r * k`, `first + r * k + 1`, ..., modulo
`n`. `first` is the middle one: the special tokens of a vocabulary stand at its two ends. Where a row has all of them,
as in a sort, each row begins one later than the row before: a program may take the first ones.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any, NamedTuple

import torch

from memexplore.virtual_gpu.values import real_tensors

_aten = torch.ops.aten


class Choosing(NamedTuple):
    """Where an op that chooses has its indices and its dimension."""

    result: int
    """Number of the result that has the indices."""
    dim: int
    """Position of the argument that says along which dimension; -1 for the last dimension."""
    is_one: bool
    """Whether it chooses one candidate along the dimension, which the result may not have."""

    def dimension(self, args: Any, kwargs: Any) -> int | None:
        """Return the dimension of a call; None for all elements."""
        if self.dim < 0:
            return -1
        if self.dim < len(args):
            return args[self.dim]  # type: ignore[no-any-return]
        return kwargs.get("dim", None if self.is_one else -1)  # type: ignore[no-any-return]


OPS: dict[Any, Choosing] = {
    _aten.topk.default: Choosing(1, 2, False),
    _aten.sort.default: Choosing(1, 1, False),
    _aten.sort.stable: Choosing(1, 2, False),
    _aten.argsort.stable: Choosing(0, 2, False),
    _aten.multinomial.default: Choosing(0, -1, False),
    _aten.argmax.default: Choosing(0, 1, True),
    _aten.argmin.default: Choosing(0, 1, True),
    _aten.max.dim: Choosing(1, 1, True),
    _aten.min.dim: Choosing(1, 1, True),
}
"""Ops that choose."""


class Routing:
    """How the choices are spread, set by the knob `skew`."""

    skew = 0.0
    """The share of the rows that choose the same candidates."""


_CHOICES = "what unknown scores choose, such as experts, tokens or classes, is "


def assumption() -> str:
    """Return the assumption about choices as a sentence."""
    if not Routing.skew:
        return f"{_CHOICES}spread evenly over all candidates"
    return f"{_CHOICES}the same in {Routing.skew:.0%} of the rows"


def were_made(notes: Iterable[str]) -> bool:
    """Return whether a run has read choices by unknown scores, which its notes say."""
    return any(_CHOICES in note for note in notes)


def candidates(scores: torch.Tensor, dim: int | None) -> int:
    """Return among how many candidates an op chooses along a dimension; None: among all elements."""
    return scores.numel() if dim is None or not scores.dim() else scores.shape[dim]


def indices(choosing: Choosing, scores: torch.Tensor, dim: int | None, shape: torch.Size) -> torch.Tensor:
    """Return the indices that a call is assumed to choose, a real tensor of a shape."""
    number = candidates(scores, dim)
    is_along_dim = not choosing.is_one and dim is not None and shape != ()
    chosen = shape[dim] if is_along_dim and dim is not None else 1
    rows = math.prod(shape) // chosen if chosen else 0
    offsets = real_tensors.arange(rows) * (1 if chosen == number else chosen)
    offsets[: math.ceil(Routing.skew * rows)] = 0
    table = (number // 2 + offsets[:, None] + real_tensors.arange(chosen)) % max(number, 1)
    if not is_along_dim or dim is None:
        return table.reshape(shape)
    others = [size for place, size in enumerate(shape) if place != dim % len(shape)]
    return table.reshape(*others, chosen).movedim(-1, dim)
