"""Name the in-place ops of autograd's formulas on a real GPU, for the out-of-place ops that the formulas run here.

Formulas test `areAnyTensorSubclassLike` (torch/csrc/autograd/FunctionsManual.cpp) before they write into a tensor that
they have just made. Virtual tensors are subclasses, so the test makes them allocate; `dispatch/autograd_engine.py`
replaces the op.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from memexplore.virtual_gpu.kernels.table import Kind, rule

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

_FORMULAS = "torch/csrc/autograd/FunctionsManual.cpp"
_WITH_LOGITS = ("BinaryCrossEntropyWithLogitsBackward0",)
_EXTREMES = ("MedianBackward0", "NanmedianBackward0", "MaxBackward1", "MinBackward1")

rule(Kind.IN_PLACE, _FORMULAS, _aten.index_put.default)(InPlace(_aten._index_put_impl_.default, (True,)))
# value_selecting_reduction_backward
rule(Kind.IN_PLACE, "ReduceOps.cpp", _aten.scatter.src)(InPlace(_aten.scatter_.src))
rule(Kind.IN_PLACE, "ReduceOps.cpp", _aten.scatter.value)(InPlace(_aten.scatter_.value))
# gather_backward, index_select_backward
rule(Kind.IN_PLACE, "TensorAdvancedIndexing.cpp", _aten.scatter_add.default)(InPlace(_aten.scatter_add_.default))
rule(Kind.IN_PLACE, "TensorAdvancedIndexing.cpp", _aten.index_add.default)(InPlace(_aten.index_add_.default))
# masked_select_backward, take_backward
rule(Kind.IN_PLACE, "TensorAdvancedIndexing.cpp", _aten.masked_scatter.default)(InPlace(_aten.masked_scatter_.default))
rule(Kind.IN_PLACE, "TensorAdvancedIndexing.cpp", _aten.put.default)(InPlace(_aten.put_.default))
# evenly_distribute_backward, clamp_backward
rule(Kind.IN_PLACE, _FORMULAS, _aten.logical_and.default)(
    InPlace(_aten.logical_and_.default, nodes=(*_EXTREMES, "ClampBackward0", "ClampBackward1"))
)
# binary_cross_entropy_with_logits_backward
rule(Kind.IN_PLACE, _FORMULAS, _aten.sub.Tensor)(InPlace(_aten.sub_.Tensor, nodes=_WITH_LOGITS))
rule(Kind.IN_PLACE, _FORMULAS, _aten.mul.Tensor)(InPlace(_aten.mul_.Tensor, nodes=_WITH_LOGITS))
rule(Kind.IN_PLACE, _FORMULAS, _aten.div.Scalar)(InPlace(_aten.div_.Scalar, nodes=_WITH_LOGITS))
rule(Kind.IN_PLACE, _FORMULAS, _aten.div.Tensor)(InPlace(_aten.div_.Tensor, nodes=_WITH_LOGITS))
