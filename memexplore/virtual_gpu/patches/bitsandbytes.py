"""Replace the native library of bitsandbytes: loading it needs CUDA's own libraries, which may be missing.

The ops of bitsandbytes arrive in the dispatch mode as all others; only managed memory, of which paged optimizers make
their states, is the library's own.
"""

from __future__ import annotations

import ctypes
import mmap
import re
import sys
from collections.abc import Callable
from typing import Any

from memexplore.virtual_gpu.patches.install import Replace
from memexplore.virtual_gpu.tensors.tensor import DeviceState
from memexplore.virtual_gpu.values import notes
from memexplore.virtual_gpu.values.value_reads import NotSimulated

_PREFIX = "libbitsandbytes_cuda"
_NO_RESERVE = 0x4000
"""MAP_NORESERVE of Linux: pages that nobody writes take no memory."""
_managed: list[tuple[mmap.mmap, Any]] = []
"""Managed memory, which bitsandbytes does not free either."""


class _Function:
    """A function of the library; bitsandbytes sets `argtypes` and `restype`."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __call__(self, *args: Any) -> Any:
        if DeviceState.gpu_name is None:
            raise NotSimulated(
                "bitsandbytes was imported while a virtual GPU was on, and has no native library: restart Python to "
                "use it without one"
            )
        if self._name == "cget_managed_ptr":
            return _managed_memory(int(args[0].value))
        if self._name in ("get_context", "cprefetch") or self._name.startswith("cfill_"):
            return 0
        raise NotSimulated(
            f"{self._name} of bitsandbytes cannot be simulated on a virtual GPU: leave it out, or profile on a real GPU"
        )


class _Library:
    """The library, as `ctypes` returns it."""

    def __init__(self) -> None:
        self._functions: dict[str, _Function] = {}

    def __getattr__(self, name: str) -> _Function:
        if name.startswith("_"):
            raise AttributeError(name)
        return self._functions.setdefault(name, _Function(name))

    def __getitem__(self, name: str) -> _Function:
        return getattr(self, name)


def _managed_memory(size: int) -> int:
    """Return the address of memory that takes no space until it is written."""
    notes.add("paged optimizer states are in managed memory, outside the allocator, and are not counted")
    flags = {"flags": mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _NO_RESERVE} if sys.platform == "linux" else {}
    memory = mmap.mmap(-1, max(size, 1), **flags)
    view = ctypes.c_char.from_buffer(memory)
    _managed.append((memory, view))
    return ctypes.addressof(view)


_IS_BITSANDBYTES = re.compile(r"bitsandbytes(\.|$)").match


def rows() -> list[Replace]:
    """Return the replacements: how the library is loaded, and the one that bitsandbytes has loaded already."""
    library = _Library()

    def load_library(loader: Any, name: Any) -> Any:
        if _PREFIX in str(name):
            return library
        return original(loader, name)

    original: Callable[..., Any] = ctypes.LibraryLoader.LoadLibrary
    loaded = [
        Replace(sys.modules[name], "lib", library)
        for name in filter(_IS_BITSANDBYTES, list(sys.modules))
        if "lib" in vars(sys.modules[name])
    ]
    return [
        Replace(ctypes.LibraryLoader, "LoadLibrary", load_library),
        *loaded,
    ]
