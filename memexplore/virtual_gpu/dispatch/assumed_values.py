"""Pass on what is assumed about known values to what an op makes of them, and note where the program reads such values.

Copies of assumed values have the same mark, and so have integers and booleans that an op makes of them. Floating-point
numbers that are made of values which the program does not have are unknown, such as an accuracy. Made of what another
rank has sent they have no mark: a loss depends on weights that rank 0 sent, as in every rank.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from memexplore.torch_internals.dispatch import pytree
from memexplore.torch_internals.tensors import storage_key, untyped_storage
from memexplore.virtual_gpu.tensors.tensor import is_virtual
from memexplore.virtual_gpu.values import known_values, notes
from memexplore.virtual_gpu.values.known_values import Assumption

_aten = torch.ops.aten
_COPIES = frozenset((_aten._to_copy.default, _aten.clone.default, _aten.copy_.default))


def read(tensors: Iterable[torch.Tensor]) -> None:
    """Note that a program reads the values of tensors, such as `item` or `nonzero`."""
    assumption = among(tensors)
    if assumption is not None:
        notes.assume(assumption.text)


def pass_on(func: Any, tensors: list[torch.Tensor], written: list[torch.Tensor], overwrites: bool, result: Any) -> None:
    """Mark what an op has made of, or written with, the values of marked tensors; remove the mark of overwritten ones.

    `overwrites`: the op does not read the tensors that it writes.
    """
    targets = set(map(id, written)) if overwrites else set()
    assumption = among(tensor for tensor in tensors if id(tensor) not in targets)
    if assumption is None:
        for tensor in written:
            if overwrites and tensor.numel() * tensor.element_size() == untyped_storage(tensor).nbytes():
                known_values.assumed.pop(storage_key(untyped_storage(tensor)), None)
        return
    made = [value for value in pytree.tree_leaves(result) if isinstance(value, torch.Tensor)]
    for value in (*written, *made):
        is_float = value.dtype.is_floating_point or value.dtype.is_complex
        if not is_virtual(value):
            if not is_float or func in _COPIES:
                # On the CPU, where the program may read it.
                notes.assume(assumption.text)
        elif not is_float or (func in _COPIES and not assumption.is_made_up):
            known_values.assume(value, assumption)
        elif assumption.is_made_up:
            known_values.forget(value)


def among(tensors: Iterable[torch.Tensor]) -> Assumption | None:
    """Return what is assumed about the values of the first tensor with a mark, None if none has one."""
    assumptions = (known_values.assumption(tensor) for tensor in tensors if is_virtual(tensor))
    return next((assumption for assumption in assumptions if assumption is not None), None)
