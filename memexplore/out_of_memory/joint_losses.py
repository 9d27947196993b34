"""Count the losses that one backward pass sums, each with a graph of its own, from the frames of a traceback."""

from __future__ import annotations

import ast
import linecache
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


def terms_until(frame: FrameType, offset: int) -> int:
    """Return how many terms of a sum a statement has computed with calls; 0 where the failing call is in no sum.

    The term of the failing call counts. `offset` is the position of the failing call's instruction.
    """
    positions = list(frame.f_code.co_positions())
    line, _, column, _ = positions[offset // 2] if offset // 2 < len(positions) else (None,) * 4
    if line is None or column is None:
        return 0
    try:
        tree = ast.parse("".join(linecache.getlines(frame.f_code.co_filename, frame.f_globals)))
    except SyntaxError:
        return 0
    return max((_terms_of_sum(node, (line, column)) for node in ast.walk(tree)), default=0)


def _terms_of_sum(node: ast.AST, place: tuple[int, int]) -> int:
    """Return the number of terms with calls of a sum whose last term is at a place in the source, else 0."""
    if not isinstance(node, ast.BinOp) or not isinstance(node.op, ast.Add | ast.Sub):
        return 0
    right = node.right
    if not (right.lineno, right.col_offset) <= place < (right.end_lineno or 0, right.end_col_offset or 0):
        return 0
    count, rest = 1, node.left
    while isinstance(rest, ast.BinOp) and isinstance(rest.op, ast.Add | ast.Sub):
        count, rest = count + _calls(rest.right), rest.left
    count += _calls(rest)
    return count if count > 1 else 0


def _calls(node: ast.AST) -> bool:
    return any(isinstance(part, ast.Call) for part in ast.walk(node))


def separate_losses(root: torch.Tensor, end: float) -> int:
    """Return of how many losses a scalar is the sum; losses that share more than weights count as one.

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
                waiting += [input_node for input_node, _ in node.next_functions if input_node is not None]
    return len({first_of(number) for number in range(len(terms))})


def _terms(root: Any) -> list[Any]:
    """Return the nodes of the losses whose sum a scalar is: sums of scalars are of scalars."""
    terms, waiting = [], [root]
    while waiting:
        node = waiting.pop()
        if node is None or node.name().endswith(_WEIGHT):
            continue
        inputs = [input_node for input_node, _ in node.next_functions if input_node is not None]
        if node.name() in _SUMS or (node.name() in _FACTORS and len(inputs) == 1):
            waiting += inputs
        else:
            terms.append(node)
    return terms
