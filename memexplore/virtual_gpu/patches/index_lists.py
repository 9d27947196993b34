"""Indexing of virtual tensors with lists, ranges and numpy arrays, whose values stay known.

C++ turns such an index into a tensor on the device of the indexed one, which is `meta` there, and its values are gone.
In: the arguments of ``Tensor.__getitem__`` and ``Tensor.__setitem__``. Out: the same with each such index as a CPU
tensor, which the kernels copy to the GPU as they do with the index that C++ makes.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from memexplore.virtual_gpu.tensors import real_tensors
from memexplore.virtual_gpu.tensors.tensor import VirtualTensor
from memexplore.virtual_gpu.tensors.virtual_array import VirtualArray

_GETITEM, _SETITEM = torch.Tensor.__getitem__, torch.Tensor.__setitem__


def _getitem(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    tensor, index = args
    return _GETITEM(tensor, _with_known_values(index) if isinstance(tensor, VirtualTensor) else index)


def _setitem(args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    tensor, index, value = args
    _SETITEM(tensor, _with_known_values(index) if isinstance(tensor, VirtualTensor) else index, value)


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


HANDLERS = {_GETITEM: _getitem, _SETITEM: _setitem}
"""Function of torch -> what the function mode calls in its place, with positional and keyword arguments."""
