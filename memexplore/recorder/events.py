"""Define the rows that a recorder writes, the storages that it reads, and the origin of an older storage."""

from __future__ import annotations

import functools
from typing import Any, NamedTuple, Protocol

import torch

from memexplore.tape import Category

LISTS = (list, tuple)
"""Types of an op's arguments that hold tensors; a union of them takes longer to check."""


class Event(NamedTuple):
    """One recorded event, as plain numbers.

    `grad` is 1 if gradients were enabled, `call` the number of the innermost open module call; in the forward of a
    `torch.autograd.Function` both are those of the code that applied it. A free has the row of its block as `call`.
    """

    time: int
    action: int
    address: int
    size: int
    phase: int
    step: int
    op: int
    module: int
    stack: int
    grad: int
    call: int
    category: int


class Origin(NamedTuple):
    """Op, module, stack and category of a block that outlives its recording, for the next recording."""

    op: str
    module: str
    stack: tuple[Any, ...]
    category: Category


class Ref(Protocol):
    """A storage that is alive on the recorded device."""

    address: int
    size: int
    origin: Any
    tag: Any


def needs_gradient(args: Any) -> bool:
    """Return whether a tensor among the arguments of an op, also inside lists, requires a gradient."""
    for value in args:
        if isinstance(value, torch.Tensor):
            if value.requires_grad:
                return True
        elif isinstance(value, LISTS) and needs_gradient(value):
            return True
    return False


# Each recording asks for the names of its ops.
@functools.lru_cache(maxsize=5000)
def op_name(func: Any) -> str:
    """Return the name of an operator on a tape, such as ``aten::mm``: without its overload. A text stays as it is.

    >>> op_name(torch.ops.aten.mm.default)
    'aten::mm'
    """
    return func if isinstance(func, str) else "::".join(str(func).split(".")[:2])
