"""Put the overlay below TorchScript, whose C++ code opens files itself and does not know virtual tensors.

A saved module with virtual tensors has no values, and cannot be loaded.
"""

from __future__ import annotations

import functools
import io
import os
import re
import zipfile
from collections.abc import Callable
from itertools import chain
from typing import Any

import torch

from memexplore.virtual_gpu.files import tensor_files
from memexplore.virtual_gpu.files.overlay import Overlay
from memexplore.virtual_gpu.files.replacements import making
from memexplore.virtual_gpu.files.tensor_files import Content
from memexplore.virtual_gpu.patches.install import Replace
from memexplore.virtual_gpu.tensors.tensor import is_virtual


def rows(overlay: Overlay) -> list[Replace]:
    """Return the replacements of saving and loading. Call it while nothing is replaced."""
    # Scripted modules are of the first kind, traced ones of the second.
    kinds: tuple[Any, ...] = (torch.jit.RecursiveScriptModule, torch.jit.ScriptModule)
    return [
        *(Replace(kind, "save", _save(overlay, kind.save)) for kind in kinds),
        Replace(torch.jit, "load", _load(overlay, torch.jit.load)),
    ]


def _save(overlay: Overlay, original: Callable[..., Any]) -> Callable[..., Any]:
    """Replace the method that `torch.jit.save` calls for a path."""

    @functools.wraps(original)
    def save(self: Any, f: Any, *args: Any, **kwargs: Any) -> Any:
        virtual = any(map(is_virtual, chain(self.parameters(), self.buffers())))
        with making(overlay, f):
            path = tensor_files.tensor_path(overlay, f, Content.UNKNOWN if virtual else Content.REAL)
            return original(self, path, *args, **kwargs)

    return save


def _load(overlay: Overlay, original: Callable[..., Any]) -> Callable[..., Any]:
    """Replace `torch.jit.load`: a module is read onto the CPU, and moved to the virtual GPU afterwards."""

    def onto(place: Any, f: Any, *args: Any, **kwargs: Any) -> Any:
        on_gpu = place is not None and torch.device(place).type == "cuda"
        module = original(f, "cpu" if on_gpu else place, *args, **kwargs)
        return module.to(place) if on_gpu else module

    @functools.wraps(original)
    def load(f: Any, map_location: Any = None, *args: Any, **kwargs: Any) -> Any:
        if not isinstance(f, (str, os.PathLike)):
            content = f.read()
            if _is_without_values(content):
                raise RuntimeError(f"this file object {_WITHOUT_VALUES}")
            return onto(map_location, io.BytesIO(content), *args, **kwargs)
        if overlay.inside or not overlay.changed:
            return onto(map_location, f, *args, **kwargs)
        path = overlay.for_reading(os.fspath(f))
        with overlay.real():
            has_values = not overlay.written.get(overlay.logical(os.fspath(f)), False)
        if has_values:
            return onto(map_location, path, *args, **kwargs)
        raise RuntimeError(f"{os.fspath(f)} {_WITHOUT_VALUES}")

    return load


_WITHOUT_VALUES = (
    "was saved by torch.jit with tensors of the virtual GPU, which have no values: keep the module in memory, or save "
    "and load its state_dict with torch.save and torch.load"
)
_ON_META = re.compile(rb"X\x04\0\0\0meta(q.|r....)(K.|M..|J....|\x8a.{1,9})tQ", re.DOTALL)
"""A storage on `meta`, the C++ device of virtual tensors: its device and its size. torch crashes when it reads one."""


def _is_without_values(content: bytes) -> bool:
    """Return whether the content of a file of `torch.jit.save` has tensors of a virtual GPU."""
    file = io.BytesIO(content)
    if not zipfile.is_zipfile(file):
        return False
    with zipfile.ZipFile(file) as archive:
        return any(_ON_META.search(archive.read(name)) for name in archive.namelist() if name.endswith("/data.pkl"))
