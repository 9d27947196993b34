"""Indexing as torch did it before 2.9: a `:` among other indices was a view of its own, with a backward of its own."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

import torch

SKIPPED_SINCE = (2, 9)
"""The release from which `applySlice` returns the tensor itself for a slice over all of a dimension.

Before, it compared the slice's end, which for `:` is the largest integer, with the dimension's length: they were never
equal (ATen/TensorIndexing.h of 2.6, 2.7, 2.8: `length.sym_eq(stop)`; of 2.9, 2.10: `length.sym_le(stop)`). The backward
of each such view makes zeros of the whole tensor's size and copies the gradient into them.
"""

_installed_getitem = torch.Tensor.__getitem__
_slice = torch.ops.aten.slice.Tensor


def getitem(tensor: torch.Tensor, index: Any) -> torch.Tensor:
    """Return ``tensor[index]``, with one view after the other as releases before `SKIPPED_SINCE` made them.

    Python's booleans and masks of several dimensions among the indices are left to the installed release.
    """
    if type(index) is not tuple or not any(type(entry) is slice for entry in index) or not _is_supported(index):
        return _installed_getitem(tensor, index)
    indexed_dims = sum(entry is not None and entry is not Ellipsis for entry in index)
    result, dim = tensor, 0
    advanced: list[Any] = []
    for entry in index:
        if entry is Ellipsis:
            dim += tensor.dim() - indexed_dims
            continue
        if type(entry) is slice and _takes_all(entry, result, dim):
            result = _slice(result, dim, 0, sys.maxsize)
        elif entry is None or type(entry) in (slice, int):
            result = _installed_getitem(result, (*_full_slices(dim), entry))
        else:
            advanced += [*_full_slices(dim - len(advanced)), entry]
        dim += type(entry) is not int
    if advanced:
        return _installed_getitem(result, tuple(advanced))
    return result if result is not tensor else _installed_getitem(tensor, index)


def _is_supported(index: tuple[Any, ...]) -> bool:
    return all(
        entry is None
        or entry is Ellipsis
        or type(entry) in (slice, int)
        or (isinstance(entry, torch.Tensor) and entry.dim() > 0 and (entry.dim() == 1 or entry.dtype is not torch.bool))
        or (isinstance(entry, Sequence) and not isinstance(entry, str))
        for entry in index
    )


def _full_slices(count: int) -> tuple[slice, ...]:
    return (slice(None),) * count


def _takes_all(entry: slice, tensor: torch.Tensor, dim: int) -> bool:
    """Whether the installed release skips a slice that earlier ones made a view of."""
    start, stop, step = entry.start, entry.stop, entry.step
    if start not in (None, 0) or step not in (None, 1) or dim >= tensor.dim():
        return False
    return stop is None or (type(stop) is int and stop > tensor.shape[dim])


__all__ = ["SKIPPED_SINCE", "getitem"]
