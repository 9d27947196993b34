"""Keep account of the storages of virtual tensors: for those on the GPU the block, its address and its reference."""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable
from typing import Any

import torch

from memexplore.text.tensor_text import dtype_of, shape_of
from memexplore.torch_internals.tensors import storage_key
from memexplore.virtual_gpu.values import known_values, value_hints


class StorageRef(weakref.ref[Any]):
    """A weak reference to a storage with its block on the device; its callback frees the block."""

    __slots__ = ("address", "holds", "key", "origin", "size", "tag", "tensor")
    address: int
    """Address of the block, 0 while the storage has no memory on the device that is on."""
    holds: int
    """Collectives that hold the storage: it keeps its block until each has ended, although it may be dead."""
    key: int
    """The storage's C++ address, its identity while it lives; another number for a dead one that is held."""
    size: int
    """Bytes, 0 for a storage that `resize_(0)` has emptied."""
    origin: Any
    """Op, module and stack of its allocation, for recordings that begin later; None if it was not recorded."""
    tag: Any
    """Category and module that a recorder knows for the storage while it has no memory, or None."""
    tensor: str
    """Shape and dtype of the tensor that the storage was made for (`tensor_text`), empty if unknown."""


live_storages: dict[int, StorageRef] = {}
"""Key -> reference of every storage alive or held on the virtual GPU, in order of allocation."""
host_storages: dict[int, StorageRef] = {}
"""Key -> reference of every storage of CPU tensors without values."""
_empty_storages: dict[int, StorageRef] = {}
"""Key -> reference of every storage of tensors without elements, which gets no block."""


class Watch:
    """What is done about the first and the last of the storages of virtual tensors: see methods.py."""

    begin: Callable[[], object] = staticmethod(lambda: None)
    """Called when a storage without a block is made, which may be while no virtual GPU is on."""
    end: Callable[[], object] = staticmethod(lambda: None)
    """Called when none is alive any more."""


def any_alive() -> bool:
    """Return whether a virtual tensor may be alive."""
    return bool(live_storages or host_storages or _empty_storages)


def storages() -> list[torch.UntypedStorage]:
    """Return the storages of virtual tensors that are alive and have elements."""
    refs = [*live_storages.values(), *host_storages.values()]
    return [storage for ref in refs if (storage := ref()) is not None]


def storage_ref(
    storage: torch.UntypedStorage, address: int, size: int, died: Callable[[StorageRef], None], tensor: str = ""
) -> StorageRef:
    """Enter a storage in `live_storages` and return its reference; `died` is called when the storage dies."""
    ref = _ref(storage, address, size, died, tensor)
    # Last in the order of allocation, also where the storage had another block before.
    live_storages.pop(ref.key, None)
    live_storages[ref.key] = ref
    return ref


def _ref(
    storage: torch.UntypedStorage, address: int, size: int, died: Callable[[StorageRef], None], tensor: str = ""
) -> StorageRef:
    ref = StorageRef(storage, died)
    ref.key, ref.address, ref.size, ref.origin, ref.tag = storage_key(storage), address, size, None, None
    ref.tensor, ref.holds = tensor, 0
    return ref


def watch_without_block(storage: torch.UntypedStorage, host: bool) -> None:
    """Keep account of a storage without a block: that of a tensor on the CPU (`host`) or without elements."""
    Watch.begin()
    ref = _ref(storage, 0, 0, _forget_host if host else _forget_empty)
    (host_storages if host else _empty_storages)[ref.key] = ref


def keep_dead(ref: StorageRef) -> None:
    """Enter a dead storage that is held, under a number that no other storage can have."""
    ref.key = -id(ref)
    live_storages[ref.key] = ref


def watch_empty(storage: torch.UntypedStorage) -> None:
    """Enter a storage without bytes, so that `resize_` recognises it as one on the device."""
    if storage_key(storage) not in live_storages:
        storage_ref(storage, 0, 0, _forget)


def forget(ref: StorageRef, table: dict[int, StorageRef] = live_storages) -> bool:
    """Remove a dead storage from its table; return whether it was there."""
    if table.get(ref.key) is not ref:
        return False
    del table[ref.key]
    value_hints.forget_storage(ref.key)
    known_values.forget_storage(ref.key)
    if not table and not any_alive():
        Watch.end()
    return True


def _forget(ref: StorageRef) -> None:
    forget(ref)


def _forget_host(ref: StorageRef) -> None:
    forget(ref, host_storages)


def _forget_empty(ref: StorageRef) -> None:
    forget(ref, _empty_storages)


def storage_address(storage: torch.UntypedStorage) -> int:
    """Return the address of a storage on the virtual GPU, 0 if it has no memory there.

    A storage without memory on the CPU has no address either: its identity stands for one, by which libraries find
    tensors that share memory.
    """
    ref = live_storages.get(storage_key(storage))
    if ref is not None:
        return ref.address
    return storage_key(storage) if storage.nbytes() else 0


def bytes_of_text(text: str) -> int:
    """Return the bytes of the elements of a tensor, from the `tensor_text` of its shape and dtype; 0 if empty."""
    shape = shape_of(text)
    return 0 if shape is None else math.prod(shape) * int(getattr(torch, dtype_of(text)).itemsize)
