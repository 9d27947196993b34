"""Index virtual tensors: lists and numpy arrays keep their values, and earlier releases make a view for each `:`.

C++ turns a list, a range or a numpy array into a tensor on the device of the indexed one, which is `meta` there, and
its values are gone. Here each such index becomes a CPU tensor, which the kernels copy to the GPU as they do with the
index that C++ makes.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from memexplore.virtual_gpu.tensors.tensor import is_virtual
from memexplore.virtual_gpu.values import real_tensors
from memexplore.virtual_gpu.values.virtual_array import VirtualArray

_GETITEM, _SETITEM = torch.Tensor.__getitem__, torch.Tensor.__setitem__
_slice = torch.ops.aten.slice.Tensor

# --- lists, ranges and numpy arrays -----------------------------------------------------------------------------------


def _getitem(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    tensor, index = args
    return _GETITEM(tensor, _with_known_values(index) if is_virtual(tensor) else index)


def _setitem(args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    tensor, index, value = args
    _SETITEM(tensor, _with_known_values(index) if is_virtual(tensor) else index, value)


def _with_known_values(index: Any) -> Any:
    if type(index) is tuple:
        return tuple([_tensor_of(entry) for entry in index])
    return _tensor_of(index)


def _tensor_of(entry: Any) -> Any:
    """Return the index that C++ makes of a list, range or numpy array, and any other entry as it is."""
    kind = type(entry)
    if kind is list or kind is range:
        if entry and all(type(number) is bool for number in entry):
            return real_tensors.tensor(entry)
        return real_tensors.tensor(entry, dtype=torch.int64) if entry and all(map(_is_integer, entry)) else entry
    if isinstance(entry, np.ndarray) and entry.ndim and not isinstance(entry, VirtualArray):
        if entry.dtype == bool:
            return real_tensors.tensor(entry)
        return (
            real_tensors.tensor(entry.astype(np.int64))
            if entry.dtype.kind in "iu" and entry.dtype.itemsize > 1
            else entry
        )
    return entry


def _is_integer(value: Any) -> bool:
    return type(value) in (int, bool) or isinstance(value, np.integer)


# --- views for each slice, until torch 2.8 ----------------------------------------------------------------------------

SKIPPED_SINCE = (2, 9)
"""The release from which `applySlice` returns the tensor itself for a slice over all of a dimension.

Before, it compared the slice's end, which for `:` is the largest integer, with the dimension's length: they were never
equal (ATen/TensorIndexing.h of 2.6, 2.7, 2.8: `length.sym_eq(stop)`; of 2.9, 2.10: `length.sym_le(stop)`). The backward
of each such view makes zeros of the whole tensor's size and copies the gradient into them.
"""


def getitem(tensor: torch.Tensor, index: Any) -> torch.Tensor:
    """Return ``tensor[index]``, with one view after the other as releases before `SKIPPED_SINCE` made them.

    Python's booleans and masks of several dimensions among the indices are left to the installed release.
    """
    if type(index) is not tuple or not any(type(entry) is slice for entry in index) or not _is_supported(index):
        return _GETITEM(tensor, index)
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
            result = _GETITEM(result, (*_full_slices(dim), entry))
        else:
            advanced += [*_full_slices(dim - len(advanced)), entry]
        dim += type(entry) is not int
    if advanced:
        return _GETITEM(result, tuple(advanced))
    return result if result is not tensor else _GETITEM(tensor, index)


def _getitem_before(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    tensor, index = args
    return getitem(tensor, _with_known_values(index)) if is_virtual(tensor) else _GETITEM(tensor, index)


def handlers(release: tuple[int, int]) -> dict[Any, Any]:
    """Return the functions that the function mode calls in place of torch's under the rules of a release."""
    return {_GETITEM: _getitem if release >= SKIPPED_SINCE else _getitem_before, _SETITEM: _setitem}


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
