"""Losses that one backward pass sums, each with a graph of its own: traceback frames go in, a number comes out."""

from __future__ import annotations

import time
from collections.abc import Iterable
from types import FrameType
from typing import Any

import torch

_SUMS = ("AddBackward0", "SubBackward0")
_FACTORS = ("DivBackward0", "MulBackward0", "NegBackward0")
"""Nodes that a loss passes through unmixed where one of their inputs requires gradients."""
_WEIGHT = "AccumulateGrad"


def losses_of(frames: Iterable[FrameType], end: float) -> int:
    """Return how many losses with graphs of their own the backward pass of some frames sums; 0 for another failure.

    0 also after the time `end`, on the clock of `time.thread_time`.
    """
    for frame in frames:
        if frame.f_code.co_name == "backward" and frame.f_globals.get("__name__") == "torch._tensor":
            root = frame.f_locals.get("self")
            return separate_losses(root, end) if isinstance(root, torch.Tensor) and root.numel() == 1 else 0
    return 0


def separate_losses(root: torch.Tensor, end: float) -> int:
    """Return of how many losses a scalar is the sum, counting those that share more than weights as one.

    >>> weight = torch.ones(3, requires_grad=True)
    >>> separate_losses(weight.exp().sum() + weight.sin().sum() / 2, time.thread_time() + 1)
    2
    >>> shared = weight.exp()
    >>> separate_losses(shared.sum() + shared.sin().sum(), time.thread_time() + 1)
    1
    """
    terms = _terms(root.grad_fn)
    group = list(range(len(terms)))
    """For each term the number of another one of its group, its own for one term of each group."""

    def first_of(number: int) -> int:
        while group[number] != number:
            number = group[number]
        return number

    term_of: dict[Any, int] = {}
    for number, term in enumerate(terms):
        waiting = [term]
        while waiting:
            node = waiting.pop()
            if time.thread_time() > end:
                return 0
            if node in term_of:
                group[first_of(number)] = first_of(term_of[node])
            elif not node.name().endswith(_WEIGHT):
                term_of[node] = number
                waiting += [each for each, _ in node.next_functions if each is not None]
    return len({first_of(number) for number in range(len(terms))})


def _terms(root: Any) -> list[Any]:
    """Return the nodes of the losses whose sum a scalar is: sums of scalars are of scalars."""
    terms, waiting = [], [root]
    while waiting:
        node = waiting.pop()
        if node is None or node.name().endswith(_WEIGHT):
            continue
        inputs = [each for each, _ in node.next_functions if each is not None]
        if node.name() in _SUMS or (node.name() in _FACTORS and len(inputs) == 1):
            waiting += inputs
        else:
            terms.append(node)
    return terms
