"""Let no file of tensors without values replace another file: `torch.save` and `numpy.memmap`."""

from __future__ import annotations

import enum
import functools
import os
import pickle
from collections.abc import Callable
from typing import Any

import numpy
import torch

from memexplore.virtual_gpu.files import policy
from memexplore.virtual_gpu.files.overlay import Overlay
from memexplore.virtual_gpu.files.replacements import imported, making
from memexplore.virtual_gpu.patches.install import Replace
from memexplore.virtual_gpu.tensors import saved
from memexplore.virtual_gpu.tensors.live_storages import any_alive
from memexplore.virtual_gpu.tensors.tensor import DeviceState, is_virtual
from memexplore.virtual_gpu.values import known_values
from memexplore.virtual_gpu.values.virtual_array import is_of_stand_ins


def rows(overlay: Overlay) -> list[Replace]:
    """Return the replacements of `torch.save` and `numpy.memmap`. Call it while nothing is replaced."""
    # With the guard, and without it in modules that imported the function before memexplore.
    originals = dict.fromkeys((torch.save, torch.serialization.save))
    return [
        *(row for original in originals for row in imported("save", original, _save(overlay, original))),
        Replace(numpy.memmap, "__new__", staticmethod(_memmap(overlay, numpy.memmap.__new__))),
    ]


class Content(enum.Enum):
    """What an object that is saved holds."""

    REAL = enum.auto()
    """No virtual tensor."""
    KNOWN = enum.auto()
    """Virtual tensors, whose values are all known and go to the file."""
    UNKNOWN = enum.auto()
    """A virtual tensor without values."""
    UNPICKLABLE = enum.auto()
    """An object that ends the saving by an error, before which the file was emptied."""


def tensor_path(overlay: Overlay, file: Any, content: Content) -> Any:
    """Return the path at which tensors are saved: in the overlay if some are virtual, else as the policy says."""
    if overlay.inside or not isinstance(os.fspath(file), str):
        return file
    with overlay.real():
        logical = overlay.logical(os.fspath(file))
        is_in_overlay = policy.is_in_overlay(overlay, logical)
    # Values of a program on the CPU are real, so a notebook may write them where it says.
    follows_policy = content is not Content.REAL or overlay.policy is policy.every_file or policy.is_saving()
    is_virtual = content in (Content.KNOWN, Content.UNKNOWN)
    if is_in_overlay or is_virtual or (follows_policy and overlay.diverts(logical)):
        return overlay.for_writing(logical, keep=False, valueless=content is Content.UNKNOWN)
    return overlay.in_place(os.fspath(file), logical)


class _UnknownError(Exception):
    """Ends the search at the first tensor without values."""


class _Sink:
    """A file that keeps nothing."""

    def write(self, data: Any) -> int:
        """Count the bytes."""
        return len(data)


def values_of(tensor: torch.Tensor) -> torch.Tensor | None:
    """Return the known values that a file keeps of a virtual tensor, None for unknown ones."""
    return known_values.of(tensor) if tensor.numel() and not saved.is_made_up(tensor) else None


def content_of(value: Any, module: Any = pickle) -> Content:
    """Return what pickling an object reaches. Nothing is written, and storages are not read.

    >>> content_of({"weight": torch.ones(2)}).name
    'REAL'
    """
    content = Content.REAL

    class Search(module.Pickler):
        def persistent_id(self, obj: Any) -> Any:
            nonlocal content
            if is_of_stand_ins(obj):
                raise _UnknownError
            if is_virtual(obj):
                if values_of(obj) is None:
                    raise _UnknownError
                content = Content.KNOWN
                return "tensor"
            is_storage = isinstance(obj, torch.storage.TypedStorage) or torch.is_storage(obj)
            return "storage" if is_storage else None

    try:
        Search(_Sink(), protocol=5, buffer_callback=lambda buffer: False).dump(value)
    except _UnknownError:
        return Content.UNKNOWN
    except Exception:
        # `torch.save` raises the error.
        return Content.UNPICKLABLE
    return content


def _pickle_module(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return args[0] if args else kwargs.get("pickle_module", pickle)


def _save(overlay: Overlay, original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def save(obj: Any, f: Any, *args: Any, **kwargs: Any) -> None:
        if isinstance(f, (str, os.PathLike)) and not overlay.inside:
            with making(overlay, f):
                path = tensor_path(overlay, f, content_of(obj, _pickle_module(args, kwargs)))
                with saved.saving():
                    return original(obj, path, *args, **kwargs)
        with saved.saving():
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
        is_off = DeviceState.gpu_name is None and any_alive()
        is_path = isinstance(f, (str, os.PathLike))
        if is_off and is_path and content_of(obj, _pickle_module(args, kwargs)) in (Content.KNOWN, Content.UNKNOWN):
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
