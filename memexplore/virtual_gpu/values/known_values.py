"""Keep the known values: for each storage on the virtual GPU whose contents are known, a copy of them on the CPU.

A copy belongs to a storage, so all views of it share the copy: a write through one view is seen through the others.
`of` returns a real CPU tensor with the layout of a virtual one. A storage without a copy is unknown.

A copy may be an assumption (`Assumption`): the choices of a router whose scores are unknown, what another rank sends.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from memexplore.torch_internals.tensors import set_conj, set_neg, storage_key, untyped_storage
from memexplore.virtual_gpu.values import real_tensors

copies: dict[int, torch.UntypedStorage] = {}
"""Key of a storage on the virtual GPU -> copy of its contents; removed when the storage dies."""
uninitialized: set[int] = set()
"""Keys of the storages to which nothing was written yet, such as those of `torch.empty`."""


class Assumption(NamedTuple):
    """Why a GPU may have other values in a storage than its copy has."""

    text: str
    """What is assumed, as a sentence without a line."""
    is_made_up: bool
    """Whether the program has no such values at all: numbers print as virtual, floats made of them are unknown."""


assumed: dict[int, Assumption] = {}
"""Key of a storage whose copy is assumed -> the assumption."""


class _Total:
    nbytes = 0


def total() -> int:
    """Return the bytes of all copies."""
    return _Total.nbytes


def is_known(tensor: torch.Tensor) -> bool:
    """Return whether the values of a virtual tensor are known; those of an empty one are."""
    return storage_key(untyped_storage(tensor)) in copies or not tensor.numel()


def of(tensor: torch.Tensor) -> torch.Tensor | None:
    """Return the values of a virtual tensor as a real tensor in its copy's storage, None for unknown values.

    Writing to the result changes the known values.
    """
    storage = untyped_storage(tensor)
    copy = copies.get(storage_key(storage))
    if copy is None:
        if tensor.numel():
            return None
        return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype)
    return in_storage(tensor, copy) if copy.nbytes() == storage.nbytes() else None


def in_storage(tensor: torch.Tensor, storage: torch.UntypedStorage) -> torch.Tensor:
    """Return a real tensor with the layout of a virtual one in a storage on the CPU of the same size."""
    real = real_tensors.empty(0, dtype=tensor.dtype)
    real.set_(storage, tensor.storage_offset(), tensor.shape, tensor.stride())  # type: ignore[call-overload]
    if tensor.dtype.is_complex and tensor.is_conj():
        set_conj(real, True)
    if tensor.is_neg():
        set_neg(real, True)
    return real


def put(tensor: torch.Tensor, values: torch.Tensor) -> None:
    """Make the values of a virtual tensor those of a real tensor of its shape and dtype.

    The storage of `values` becomes the copy where the layouts are equal: nothing else may write to it. Elements of the
    storage outside the tensor keep their values, or are 0 in a storage that was unknown.
    """
    storage = untyped_storage(tensor)
    if not tensor.numel():
        # Nothing watches an empty storage, and its values are known without a copy.
        return
    copy = untyped_storage(values)
    if (
        storage_key(storage) not in copies
        and values.stride() == tensor.stride()
        and values.storage_offset() == tensor.storage_offset()
        and copy.nbytes() == storage.nbytes()
        and not (values.is_conj() or values.is_neg())
    ):
        _insert(storage_key(storage), copy)
    else:
        if storage_key(storage) not in copies:
            make_known(tensor)
        target = of(tensor)
        assert target is not None
        target.copy_(values)


def put_storage(tensor: torch.Tensor, storage: torch.UntypedStorage) -> None:
    """Make a real storage, which nothing else may write to, the copy of a virtual tensor's if their sizes are equal."""
    mine = untyped_storage(tensor)
    if tensor.numel() and storage.nbytes() == mine.nbytes():
        _insert(storage_key(mine), storage)


def make_known(tensor: torch.Tensor) -> None:
    """Make the storage of a virtual tensor known, filled with zeros for the caller to overwrite."""
    storage = untyped_storage(tensor)
    _insert(storage_key(storage), real_tensors.zeros(storage.nbytes(), dtype=torch.uint8).untyped_storage())


def assumption(tensor: torch.Tensor) -> Assumption | None:
    """Return what is assumed about the values of a tensor that has a copy, None where they are known for certain."""
    return assumed.get(storage_key(untyped_storage(tensor))) if assumed else None


def assume(tensor: torch.Tensor, assumption: Assumption) -> None:
    """Mark the copy of a tensor's storage as assumed; an empty tensor has nothing to assume."""
    key = storage_key(untyped_storage(tensor))
    if key in copies:
        assumed[key] = assumption


def copy_of(tensor: torch.Tensor) -> torch.UntypedStorage | None:
    """Return the copy of a virtual tensor's storage, None for an unknown one."""
    return copies.get(storage_key(untyped_storage(tensor)))


def mark_uninitialized(tensor: torch.Tensor) -> None:
    """Note that nothing was written yet to the storage of a virtual tensor.

    Nothing watches the storages of empty tensors and of those on the CPU.
    """
    if tensor.numel() and tensor.is_cuda:
        uninitialized.add(storage_key(untyped_storage(tensor)))


def _insert(key: int, copy: torch.UntypedStorage) -> None:
    forget_storage(key)
    copies[key] = copy
    _Total.nbytes += copy.nbytes()


def forget(tensor: torch.Tensor) -> None:
    """Make the storage of a virtual tensor unknown."""
    forget_storage(storage_key(untyped_storage(tensor)))


def forget_storage(key: int) -> None:
    """Make a storage unknown, given its key: its contents were overwritten, or it died."""
    copy = copies.pop(key, None)
    if copy is not None:
        _Total.nbytes -= copy.nbytes()
    uninitialized.discard(key)
    if assumed:
        assumed.pop(key, None)


def forget_all() -> None:
    """Make all storages unknown."""
    copies.clear()
    uninitialized.clear()
    assumed.clear()
    _Total.nbytes = 0
