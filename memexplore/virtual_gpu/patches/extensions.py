"""Notice compiled extensions that use torch: from the first on, tensors without memory refuse to be read.

An extension that asks for an address to write to gets an error in any case (torch_internals/memory_access.py).
"""

from __future__ import annotations

import ctypes
import functools
import os
from collections.abc import Callable
from importlib.machinery import ExtensionFileLoader
from typing import Any

import torch

from memexplore.torch_internals.memory_access import Reading, update_reading
from memexplore.virtual_gpu.patches.install import Call, Patch, Replace
from memexplore.virtual_gpu.tensors.live_storages import storages

_SYMBOL = "_ZTIN3c1011StorageImplE"
"""The type of storages in torch's library c10."""
_TORCH = os.path.dirname(torch.__file__) + os.sep


class _Library(ctypes.Structure):
    """What `dl_iterate_phdr` tells of a loaded library (link.h)."""

    _fields_ = (
        ("address", ctypes.c_void_p),
        ("path", ctypes.c_char_p),
        ("headers", ctypes.c_void_p),
        ("number_of_headers", ctypes.c_uint16),
        ("loaded_so_far", ctypes.c_ulonglong),
    )


_Visit = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.POINTER(_Library), ctypes.c_size_t, ctypes.c_void_p)
_visit_all: Any = getattr(ctypes.CDLL(None), "dl_iterate_phdr", None) if os.name == "posix" else None
"""Calls a function for each loaded library until it returns 1; None on systems other than Linux and BSD."""


def patches() -> list[Patch]:
    """Return the patches: extensions loaded before, and those that the program loads."""
    if _visit_all is None:
        return []
    return [
        Call(_look),
        Replace(ExtensionFileLoader, "exec_module", _then_looking(ExtensionFileLoader.exec_module)),
        Replace(torch.ops, "load_library", _then_looking(torch.ops.load_library)),
    ]


def _look() -> None:
    if Reading.by_extensions or _is_any_loaded(_loaded_so_far()):
        Reading.by_extensions = True
        update_reading(storages())


def _then_looking(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def load(*args: Any, **kwargs: Any) -> Any:
        result = original(*args, **kwargs)
        if not Reading.by_extensions:
            _look()
        return result

    return load


def _loaded_so_far() -> int:
    """Return how many libraries the process has loaded."""
    count = 0

    def first(library: Any, size: int, data: Any) -> int:
        nonlocal count
        count = library.contents.loaded_so_far
        return 1

    _visit_all(_Visit(first), None)
    return count


@functools.lru_cache(maxsize=1)
def _is_any_loaded(loaded_so_far: int) -> bool:
    """Whether one of the loaded libraries is an extension that uses torch."""
    names: list[bytes] = []

    def add(library: Any, size: int, data: Any) -> int:
        names.append(library.contents.path or b"")
        return 0

    _visit_all(_Visit(add), None)
    return any(map(_uses_torch, filter(None, names)))


@functools.cache
def _uses_torch(name: bytes) -> bool:
    """Whether a loaded library was linked with torch's: a symbol is looked for in it and in the libraries it needs."""
    path = os.fsdecode(name)
    if path.startswith(_TORCH):
        return False
    try:
        return hasattr(ctypes.CDLL(path, mode=os.RTLD_NOLOAD), _SYMBOL)
    except OSError:
        return False
