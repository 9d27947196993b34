"""In-place ops of autograd's formulas on a real GPU, for the out-of-place ops that the formulas run here.

Formulas test `areAnyTensorSubclassLike` (torch/csrc/autograd/FunctionsManual.cpp) before they write into a tensor that
they have just made. Virtual tensors are subclasses, so the test makes them allocate; `dispatch/autograd_engine.py`
replaces the op.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

_aten = torch.ops.aten


class InPlace(NamedTuple):
    """An in-place op that replaces an out-of-place op in the backward pass."""

    op: Any
    arguments: tuple[Any, ...] = ()
    """Arguments beyond those of the out-of-place op."""
    nodes: tuple[str, ...] = ()
    """Names of the autograd nodes whose formulas work in the memory of an intermediate result.

    Empty: any formula that writes into zeros which it has just made.
    """


MAKES_ZEROS = frozenset({_aten.zeros.default, _aten.new_zeros.default, _aten.zeros_like.default})
"""Ops that formulas call to make zeros that they then write into."""
