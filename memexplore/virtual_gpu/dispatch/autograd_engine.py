"""Tell which ops of a backward pass reuse memory on a real GPU, because the autograd engine works in place.

InputBuffer::accumulate (torch/csrc/autograd/input_buffer.cpp) adds a second gradient into the first if nothing else
refers to it, and several formulas write into a tensor that they have just made (kernels/autograd_in_place.py). Where
`isTensorSubclassLike` is true, as for virtual tensors, both allocate instead.
"""

from __future__ import annotations

import contextlib
import functools
import sys
from collections.abc import Callable, Iterator
from types import CodeType
from typing import Any

import torch

from memexplore.torch_internals.dispatch import TorchDispatchMode
from memexplore.torch_internals.modules import engine_run_backward
from memexplore.torch_internals.tensors import (
    current_autograd_node,
    storage_key,
    storage_use_count,
    untyped_storage,
    use_count,
)
from memexplore.virtual_gpu.kernels.autograd_in_place import InPlace
from memexplore.virtual_gpu.tensors.tensor import HOST, is_virtual, wrap

_ADD = torch.ops.aten.add.Tensor
_run_backward = engine_run_backward.__code__
_wrappers: set[CodeType] = set()


def passes_through(kernel: Callable[..., Any]) -> None:
    """Declare that a Python kernel, such as those of autocast, calls its op again: a call by the engine stays one."""
    _wrappers.add(kernel.__code__)


class _Probe(TorchDispatchMode):
    """Notes the reference counts, seen in an op, of a gradient that only the engine refers to."""

    counts: tuple[int, int] = (0, 0)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.prim.device.default:
            return HOST
        if func is _ADD:
            self.counts = _reference_counts(args[0])
        return wrap(torch.empty(2, device="meta"), host=True)


def _reference_counts(tensor: torch.Tensor) -> tuple[int, int]:
    return use_count(tensor), storage_use_count(storage_key(untyped_storage(tensor)))  # type: ignore[attr-defined]


@functools.cache
def sole_owner_counts() -> tuple[int, int]:
    """Return the references to a gradient and to its storage, seen in an op, when only the engine has a reference."""
    with torch.inference_mode(False), torch.enable_grad():
        leaf, *gradients = (wrap(torch.empty(2, device="meta"), host=True) for _ in range(3))
        leaf.requires_grad_()
        with _Probe() as probe:
            shared = leaf.neg()
            torch.autograd.backward([shared.neg(), shared.neg()], gradients)
    return probe.counts


_probes = True


@contextlib.contextmanager
def without_backward() -> Iterator[None]:
    """Let a virtual GPU be turned on in the block without a backward pass: torch refuses one in a process forked later.

    No backward pass may run in the block.
    """
    global _probes
    before, _probes = _probes, False
    try:
        yield
    finally:
        _probes = before


def prepare() -> None:
    """Find what `sole_owner_counts` returns, which needs a backward pass, before the first op of a virtual GPU."""
    if _probes:
        sole_owner_counts()


def called_from_engine(depth: int) -> bool:
    """Return whether the running backward pass itself called the op that is `depth` frames above the caller."""
    if current_autograd_node() is None or torch.is_grad_enabled():
        return False
    frame = sys._getframe(depth + 1)
    # `OpOverload.__call__`, and the kernel that calls it.
    caller = frame.f_back
    if caller is not None and caller.f_code in _wrappers and caller.f_back is not None:
        frame = caller.f_back
    return frame.f_code is _run_backward


def in_place_op(func: Any, rule: InPlace, args: Any) -> Any:
    """Return the in-place op that the running node's formula calls on a real GPU; `func` itself if it calls none."""
    node = current_autograd_node()
    if node is None or node.name() not in rule.nodes:
        return func
    uses, storage_uses = _reference_counts(args[0])
    sole_uses, sole_storage_uses = sole_owner_counts()
    return rule.op if uses <= sole_uses and storage_uses <= sole_storage_uses else func


def accumulates(args: Any) -> bool:
    """Return whether an addition of the backward pass writes into its first operand."""
    old, new = args[0], args[1]
    return (
        is_virtual(old)
        and is_virtual(new)
        and old.shape == new.shape
        and old.dtype is new.dtype
        and _reference_counts(old) == sole_owner_counts()
        and is_non_overlapping_and_dense(old)
    )


def is_non_overlapping_and_dense(tensor: torch.Tensor) -> bool:
    """Return whether the strides are those of a permuted contiguous tensor."""
    expected = 1
    for step, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size != 1:
            if step != expected:
                return False
            expected *= size
    return True
