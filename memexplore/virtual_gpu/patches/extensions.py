"""Notice compiled extensions that use torch: from the first on, tensors without memory refuse to be read.

An extension that asks for an address to write to gets an error in any case (torch_internals/memory_access.py).
"""

from __future__ import annotations

import ctypes
import functools
import os
from collections.abc import Callable
from importlib.machinery import ExtensionFileLoader
from pathlib import Path
from typing import Any

import torch

from memexplore.torch_internals.memory_access import Reading, update_reading
from memexplore.virtual_gpu.patches.install import Call, Patch, Replace
from memexplore.virtual_gpu.tensors.live_storages import storages

_SYMBOL = "_ZTIN3c1011StorageImplE"
"""The type of storages in torch's library c10."""
_TORCH = os.path.dirname(torch.__file__) + os.sep


_MAPS = Path("/proc/self/maps")
"""What Linux says of the memory of this process: a line for each part, with the file that it is of (proc(5))."""


def patches() -> list[Patch]:
    """Return the patches: extensions loaded before, and those that the program loads."""
    if not _MAPS.exists():
        return []
    return [
        Call(_look),
        Replace(ExtensionFileLoader, "exec_module", _then_looking(ExtensionFileLoader.exec_module)),
        Replace(torch.ops, "load_library", _then_looking(torch.ops.load_library)),
    ]


def _look() -> None:
    if Reading.by_extensions or any(map(_uses_torch, _libraries())):
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


def _libraries() -> set[str]:
    """Return the paths of the libraries that the process has loaded."""
    # Not by dl_iterate_phdr: ctypes would lose an interrupt that comes while it calls a function of Python.
    lines = _MAPS.read_text(encoding="utf-8", errors="surrogateescape").splitlines()
    return {line[line.index("/") :] for line in lines if " r-xp " in line and "/" in line}


@functools.cache
def _uses_torch(path: str) -> bool:
    """Whether a loaded library was linked with torch's: a symbol is looked for in it and in the libraries it needs."""
    if path.startswith(_TORCH):
        return False
    try:
        return hasattr(ctypes.CDLL(path, mode=os.RTLD_NOLOAD), _SYMBOL)
    except OSError:
        return False
