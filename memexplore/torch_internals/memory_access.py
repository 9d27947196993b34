"""Let C++ that asks for the address of a tensor without memory get an error; with a null pointer the process would die.

A storage refuses its address where a program would write to it, which torch lets Python set, and where a program would
read it, which torch lets Python set in CUDA builds only: two flags of c10/core/StorageImpl.h, next to each other. So
the place of the second is found from that of the first.
"""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Callable, Iterable, Iterator
from types import SimpleNamespace
from typing import Any

import torch

from memexplore.torch_internals.table import NO_VIRTUAL_GPU, TABLE, Internal, look_up, replaceable
from memexplore.torch_internals.tensors import storage_key, untyped_storage

_IF_MISSING = "a compiled extension on a virtual GPU may crash"
_BYTES = 80
"""Bytes at the beginning of a storage that have the flags; it is 104 bytes long, or more in earlier releases."""

_refuse_writing: Callable[[torch.Tensor], None] = look_up(
    "torch._C._set_throw_on_mutable_data_ptr",
    "C++ that asks a tensor without memory for its address gets an error; otherwise null, and the process would crash",
    _IF_MISSING,
)
_address: Callable[[torch.UntypedStorage], int] = look_up(
    "torch._C.StorageBase.data_ptr",
    "a storage's own `data_ptr`, which is replaced while virtual tensors are alive",
    _IF_MISSING,
)
_resize: Callable[[torch.UntypedStorage, int], torch.UntypedStorage] = look_up(
    "torch._C.StorageBase.resize_",
    "a storage's own `resize_`, which is replaced while a virtual GPU is on",
    NO_VIRTUAL_GPU,
)
PROFILER_START = replaceable(
    "torch.autograd.profiler.profile._start_trace",
    "torch.profiler reads the addresses of tensors from here on, to tell them apart",
    "torch.profiler with shapes or stacks ends in an error on a virtual GPU",
)


def _flags() -> Callable[[int], Any]:
    """Return what gives access to the flag of a storage at an address: `.refused`, in memory where it was found."""
    tensor = torch.empty(1, device="meta")
    storage = untyped_storage(tensor)
    address = storage_key(storage)
    before = ctypes.string_at(address, _BYTES)
    _refuse_writing(tensor)
    after = ctypes.string_at(address, _BYTES)
    changed = [place for place in range(_BYTES) if before[place] != after[place]]
    # Whether there is anything to check, whether writing is refused, and then whether reading is.
    place = changed[-1] + 1 if len(changed) == 2 else _BYTES
    if changed != [place - 2, place - 1] or after[place : place + 1] != b"\0":
        return _nowhere

    class Flags(ctypes.Structure):
        _fields_ = (("others", ctypes.c_char * place), ("refused", ctypes.c_bool))

    Flags.from_address(address).refused = True
    return Flags.from_address if _refuses(storage) else _nowhere


def _nowhere(address: int) -> Any:
    return SimpleNamespace(refused=False)


def _refuses(storage: torch.UntypedStorage) -> bool:
    try:
        _address(storage)
    except RuntimeError as error:
        # What torch says for the flag of reading: c10/core/StorageImpl.cpp.
        return "Storage that is invalid" in str(error)
    return False


_flags_at = _flags()
TABLE.append(
    Internal(
        "c10::StorageImpl.throw_on_immutable_data_ptr_",
        "a storage without memory refuses its address to C++ that would read it, by a flag behind the one for writing",
        _IF_MISSING,
        lambda: _flags() is not _nowhere,
    )
)


class Reading:
    """Whether C++ that would read a tensor without memory gets an error; `update_reading` after a change."""

    by_extensions = False
    """Whether a compiled extension may read it."""
    by_profiler = False
    """Whether torch's profiler reads addresses, to tell tensors apart."""
    by_reducer = False
    """Whether the C++ part of DistributedDataParallel compares addresses of gradients and buckets."""
    refused = False
    """What these make of it: without an extension no step takes the time for it."""


def refuse_memory_access(tensor: torch.Tensor) -> None:
    """Let C++ that asks for the address of a tensor's memory get an error."""
    _refuse_writing(tensor)
    if Reading.refused:
        _flags_at(storage_key(untyped_storage(tensor))).refused = True


def update_reading(storages: Iterable[torch.UntypedStorage]) -> None:
    """Let C++ that would read storages without memory, and others that are made from now on, get an error or null."""
    Reading.refused = Reading.by_extensions and not (Reading.by_profiler or Reading.by_reducer)
    for storage in storages:
        _flags_at(storage_key(storage)).refused = Reading.refused


def set_storage(
    tensor: torch.Tensor, storage: torch.UntypedStorage, offset: int, shape: Iterable[int], stride: Iterable[int]
) -> torch.Tensor:
    """`tensor.set_(...)`, for which C++ reads the address of a storage whose address may be refused."""
    if not Reading.refused:
        return tensor.set_(storage, offset, shape, stride)  # type: ignore[call-overload, no-any-return]
    # As `allowed`, in a third of its time: views are frequent.
    flags = _flags_at(storage_key(storage))
    refused, flags.refused = flags.refused, False
    try:
        return tensor.set_(storage, offset, shape, stride)  # type: ignore[call-overload, no-any-return]
    finally:
        flags.refused = refused


@contextlib.contextmanager
def allowed(storages: Iterable[torch.UntypedStorage]) -> Iterator[None]:
    """Let C++ read the addresses of storages for a block, such as kernels of torch that ask whether tensors overlap."""
    kept = tuple(storages)
    changed = [flags for flags in map(_flags_at, map(storage_key, kept)) if flags.refused]
    try:
        for flags in changed:
            flags.refused = False
        yield
    finally:
        for flags in changed:
            flags.refused = True


def storage_resize(storage: torch.UntypedStorage, size: int) -> torch.UntypedStorage:
    """`storage.resize_(size)` of torch itself, which reads the address."""
    with allowed([storage]):
        return _resize(storage, size)


__all__ = [
    "PROFILER_START",
    "Reading",
    "allowed",
    "refuse_memory_access",
    "set_storage",
    "storage_resize",
    "update_reading",
]
