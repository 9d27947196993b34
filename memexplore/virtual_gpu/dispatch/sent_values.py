"""Note where a program reads a value that another rank sends and of which this rank knows only its own.

Such as a number that rank 0 alone has read and broadcasts. Copies of it have the same mark, and integers and booleans
that an op makes of such values. Other floating-point numbers have no mark: a loss depends on weights that rank 0 sent,
as in every rank.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from memexplore.torch_internals.dispatch import pytree
from memexplore.torch_internals.tensors import storage_key, untyped_storage
from memexplore.virtual_gpu.tensors.tensor import is_virtual
from memexplore.virtual_gpu.values import known_values, notes, reading

_aten = torch.ops.aten
_COPIES = frozenset((_aten._to_copy.default, _aten.clone.default, _aten.copy_.default))


def read(tensors: Iterable[torch.Tensor]) -> None:
    """Note that a program reads the values of tensors, such as `item` or `nonzero`."""
    sender = _sender(tensors)
    if sender is not None:
        notes.assume(reading.SENT_BY_ANOTHER.format(sender))


def pass_on(func: Any, tensors: list[torch.Tensor], written: list[torch.Tensor], overwrites: bool, result: Any) -> None:
    """Mark what an op has made of, or written with, the values of marked tensors; remove the mark of overwritten ones.

    `overwrites`: the op does not read the tensors that it writes.
    """
    targets = set(map(id, written)) if overwrites else set()
    sender = _sender(tensor for tensor in tensors if id(tensor) not in targets)
    made = [value for value in pytree.tree_leaves(result) if isinstance(value, torch.Tensor)]
    if sender is None:
        for tensor in written:
            if overwrites and tensor.numel() * tensor.element_size() == untyped_storage(tensor).nbytes():
                known_values.received.pop(storage_key(untyped_storage(tensor)), None)
        return
    for value in (*written, *made):
        if func not in _COPIES and (value.dtype.is_floating_point or value.dtype.is_complex):
            continue
        if not is_virtual(value):
            # On the CPU, where the program may read it.
            notes.assume(reading.SENT_BY_ANOTHER.format(sender))
        elif value.numel() and known_values.is_known(value):
            known_values.received[storage_key(untyped_storage(value))] = sender


def _sender(tensors: Iterable[torch.Tensor]) -> int | None:
    senders = (known_values.sender(tensor) for tensor in tensors if is_virtual(tensor))
    return next((rank for rank in senders if rank is not None), None)
