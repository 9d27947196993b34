"""What autograd does in place on a real GPU and out of place on tensor subclasses, which virtual tensors are.

InputBuffer::accumulate (torch/csrc/autograd/input_buffer.cpp) adds a second gradient into the first one where nobody
else holds it, and several formulas of FunctionsManual.cpp write into the zeros that they just made; where
`isTensorSubclassLike` is true both take new memory instead. Here the in-place way is restored.
"""

from __future__ import annotations

import functools
import sys
from typing import Any

import torch

from memexplore.torch_internals.dispatch import TorchDispatchMode, fake_device_of
from memexplore.torch_internals.modules import engine_run_backward
from memexplore.torch_internals.tensors import (
    current_autograd_node,
    storage_key,
    storage_use_count,
    untyped_storage,
    use_count,
)
from memexplore.virtual_gpu.tensors.tensor import VirtualTensor, wrap

_aten = torch.ops.aten
_ADD = _aten.add.Tensor
_run_backward = engine_run_backward.__code__

# index_backward, value_selecting_reduction_backward, gather_backward, index_select_backward: into fresh zeros.
INTO_ZEROS: dict[Any, tuple[Any, tuple[Any, ...]]] = {
    _aten.index_put.default: (_aten._index_put_impl_.default, (True,)),
    _aten.scatter.src: (_aten.scatter_.src, ()),
    _aten.scatter.value: (_aten.scatter_.value, ()),
    _aten.scatter_add.default: (_aten.scatter_add_.default, ()),
    _aten.index_add.default: (_aten.index_add_.default, ()),
}
"""Op of the formula -> the op that a real GPU runs, and its further arguments (index_put: indices are not checked)."""
ZEROS = frozenset({_aten.zeros.default, _aten.new_zeros.default, _aten.zeros_like.default})


# Nodes whose formula goes on in the memory of its first intermediate result.
INTO_FIRST: dict[str, dict[Any, Any]] = {
    "BinaryCrossEntropyWithLogitsBackward0": {
        _aten.sub.Tensor: _aten.sub_.Tensor,
        _aten.mul.Tensor: _aten.mul_.Tensor,
        _aten.div.Scalar: _aten.div_.Scalar,
        _aten.div.Tensor: _aten.div_.Tensor,
    },
}
RESTORED = frozenset({_ADD, *INTO_ZEROS, *(op for ops in INTO_FIRST.values() for op in ops)})
"""Ops whose caller has to be looked at."""


class _Probe(TorchDispatchMode):
    """Notes how often a gradient that only the engine holds is counted when an op gets it."""

    counts: tuple[int, int] = (0, 0)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.prim.device.default:
            return fake_device_of(args[0])
        if func is _ADD:
            self.counts = _counts(args[0])
        return wrap(torch.empty(2, device="meta"), host=True)


def _counts(tensor: torch.Tensor) -> tuple[int, int]:
    return use_count(tensor), storage_use_count(storage_key(untyped_storage(tensor)))  # type: ignore[attr-defined]


@functools.cache
def alone() -> tuple[int, int]:
    """References to a gradient and to its storage as seen in an op, where the engine alone holds it."""
    with torch.inference_mode(False), torch.enable_grad():
        leaf, *gradients = (wrap(torch.empty(2, device="meta"), host=True) for _ in range(3))
        leaf.requires_grad_()
        with _Probe() as probe:
            twice = leaf.neg()
            torch.autograd.backward([twice.neg(), twice.neg()], gradients)
    return probe.counts


def called_from_engine(depth: int) -> bool:
    """Whether the op in whose frame, `depth` calls up, this is asked was called by the running backward pass itself."""
    if current_autograd_node() is None or torch.is_grad_enabled():
        return False
    return sys._getframe(depth + 1).f_code is _run_backward


def goes_on(func: Any, args: Any) -> Any:
    """The in-place op that a formula runs on a real GPU instead of this one; None where it runs this one."""
    node = current_autograd_node()
    ops = INTO_FIRST.get(node.name()) if node is not None else None
    if ops is None or func not in ops:
        return None
    first = args[0]
    alone_count, alone_storage = alone()
    uses, storages = _counts(first)
    return ops[func] if uses <= alone_count and storages <= alone_storage else None


def accumulates(args: Any) -> bool:
    """Whether an addition of the backward pass goes into its first operand."""
    old, new = args[0], args[1]
    return (
        isinstance(old, VirtualTensor)
        and isinstance(new, VirtualTensor)
        and old.shape == new.shape
        and old.dtype is new.dtype
        and _counts(old) == alone()
        and _dense(old)
    )


def _dense(tensor: torch.Tensor) -> bool:
    """`is_non_overlapping_and_dense`: the strides are those of a permuted contiguous tensor."""
    expected = 1
    for step, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size != 1:
            if step != expected:
                return False
            expected *= size
    return True
