"""Tell which CPU tensors have pinned memory, as on a machine with a GPU: a property of the storage.

Pinned memory is memory of the host, so it costs nothing on the GPU; here it is ordinary memory with a mark.
"""

from __future__ import annotations

import weakref
from typing import Any

import torch

from memexplore.torch_internals.tensors import storage_key, untyped_storage
from memexplore.virtual_gpu.tensors.tensor import HOST, fake_cpu_tensor, inherits_dispatch, is_on_host, is_virtual

_pinned: dict[int, weakref.ref[torch.UntypedStorage]] = {}
"""Key -> reference of every pinned storage that lives."""
_REFUSED = "only dense CPU tensors can be pinned"


def is_pinned(tensor: torch.Tensor, device: Any = None) -> bool:
    """`Tensor.is_pinned`."""
    return _has_storage(tensor) and storage_key(untyped_storage(tensor)) in _pinned


def pinned(tensor: torch.Tensor, device: Any = None) -> torch.Tensor:
    """`Tensor.pin_memory`: a copy in pinned memory with the same strides, or the tensor itself if it is pinned.

    Raises RuntimeError for a tensor on a GPU.
    """
    if not _has_storage(tensor) or is_pinned(tensor):
        return tensor
    if not _is_on_cpu(tensor):
        raise RuntimeError(f"cannot pin '{tensor.type()}' {_REFUSED}")
    shape, stride = tuple(tensor.shape), tensor.stride()
    if is_virtual(tensor):
        copy = fake_cpu_tensor(shape, tensor.dtype, stride)
    else:
        copy = torch.empty_strided(shape, stride, dtype=tensor.dtype, device=HOST)
    return mark(copy.copy_(tensor))


def mark(tensor: torch.Tensor) -> torch.Tensor:
    """Mark the memory of a new tensor as pinned, and return the tensor.

    Raises RuntimeError for a tensor that is not on the CPU.
    """
    if not _is_on_cpu(tensor):
        raise RuntimeError(_REFUSED[0].upper() + _REFUSED[1:])
    storage = untyped_storage(tensor)
    if storage.nbytes():  # no memory, none that is pinned
        key = storage_key(storage)
        _pinned[key] = weakref.ref(storage, lambda _: _pinned.pop(key, None))
    return tensor


def _has_storage(tensor: torch.Tensor) -> bool:
    """Return whether a tensor is no wrapper of others, such as a DTensor, and not sparse."""
    return tensor.layout is torch.strided and inherits_dispatch(type(tensor))


def _is_on_cpu(tensor: torch.Tensor) -> bool:
    return is_on_host(tensor) if is_virtual(tensor) else tensor.device.type == "cpu"
