"""`torch.save` and `numpy.memmap` on a virtual GPU: a file of tensors without values never replaces another file."""

from __future__ import annotations

import functools
import os
import pickle
from collections.abc import Callable
from typing import Any

import numpy
import torch

from memexplore.virtual_gpu.files import policy
from memexplore.virtual_gpu.files.overlay import Overlay
from memexplore.virtual_gpu.files.replacements import making
from memexplore.virtual_gpu.patches.install import Replace
from memexplore.virtual_gpu.tensors.tensor import DeviceState, VirtualTensor


def rows(overlay: Overlay) -> list[Replace]:
    """Return the replacements of `torch.save` and `numpy.memmap`. Call it while nothing is replaced."""
    return [
        Replace(torch, "save", _save(overlay, torch.save)),
        Replace(torch.serialization, "save", _save(overlay, torch.serialization.save)),
        Replace(numpy.memmap, "__new__", staticmethod(_memmap(overlay, numpy.memmap.__new__))),
    ]


def tensor_path(overlay: Overlay, file: Any, valueless: bool) -> Any:
    """Return the path at which tensors are saved: in the overlay if some have no values, else as the policy says."""
    if overlay.inside or not isinstance(os.fspath(file), str):
        return file
    with overlay.real():
        logical = overlay.logical(os.fspath(file))
    # Values are real elsewhere, so a notebook may write them where it says.
    follows_policy = overlay.policy is policy.every_file or policy.is_saving()
    if valueless or overlay.in_overlay(logical) or (follows_policy and overlay.diverts(logical)):
        return overlay.for_writing(logical, keep=False, valueless=valueless)
    return file


class _FoundError(Exception):
    """Ends the search at the first tensor without values."""


class _Sink:
    """A file that keeps nothing."""

    def write(self, data: Any) -> int:
        """Count the bytes."""
        return len(data)


def lacks_values(value: Any, module: Any = pickle) -> bool:
    """Whether pickling an object reaches a virtual tensor. Nothing is written, and storages are not read.

    >>> lacks_values({"weight": torch.ones(2)})
    False
    """

    class Search(module.Pickler):
        def persistent_id(self, found: Any) -> Any:
            if isinstance(found, VirtualTensor):
                raise _FoundError
            is_storage = isinstance(found, torch.storage.TypedStorage) or torch.is_storage(found)
            return "storage" if is_storage else None

    try:
        Search(_Sink(), protocol=5, buffer_callback=lambda buffer: False).dump(value)
    except _FoundError:
        return True
    except Exception:
        # `torch.save` raises the error.
        return False
    return False


def _pickle_module(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return args[0] if args else kwargs.get("pickle_module", pickle)


def _save(overlay: Overlay, original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def save(obj: Any, f: Any, *args: Any, **kwargs: Any) -> None:
        if isinstance(f, (str, os.PathLike)):
            with making(overlay, f):
                path = tensor_path(overlay, f, lacks_values(obj, _pickle_module(args, kwargs)))
                return original(obj, path, *args, **kwargs)
        return original(obj, f, *args, **kwargs)

    return save


# --- after the virtual GPU is off -----------------------------------------------------------------------------------


def guard() -> None:
    """Let `torch.save` refuse tensors without values before it opens a file, from now on in this process.

    It is the only replacement that stays while no virtual GPU is on: `torch.save` empties the file before it pickles
    the first tensor, so an error of the tensor would come too late.
    """
    if not getattr(torch.save, "memexplore_guard", False):
        setattr(torch, "save", _guarded(torch.save))  # noqa: B010 - mypy refuses the assignment


def _guarded(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def save(obj: Any, f: Any, *args: Any, **kwargs: Any) -> None:
        is_off = DeviceState.gpu_name is None and DeviceState.fake is not None
        if is_off and isinstance(f, (str, os.PathLike)) and lacks_values(obj, _pickle_module(args, kwargs)):
            raise RuntimeError(
                f"{os.fspath(f)} was not written: its tensors were made on a virtual GPU, which is off now, and have "
                "no values; create them again on a real device, or save them while the virtual GPU is on"
            )
        original(obj, f, *args, **kwargs)

    save.memexplore_guard = True  # type: ignore[attr-defined]
    return save


# --- numpy ----------------------------------------------------------------------------------------------------------


def _memmap(overlay: Overlay, original: Callable[..., Any]) -> Callable[..., Any]:
    """`numpy.memmap`, whose default mode changes the file: changes of a file that is kept stay in memory."""

    @functools.wraps(original)
    def new(subtype: Any, filename: Any, dtype: Any = numpy.uint8, mode: str = "r+", *args: Any, **kwargs: Any) -> Any:
        if mode in ("r+", "readwrite") and isinstance(filename, (str, os.PathLike)) and not overlay.inside:
            with overlay.real():
                logical = overlay.logical(os.fspath(filename))
            if not overlay.in_overlay(logical) and overlay.diverts(logical):
                mode = "c"
        return original(subtype, filename, dtype, mode, *args, **kwargs)

    return new
