"""Note the files into which numpy, pickle and h5py write arrays of unknown values, and put the overlay below h5py.

numpy's archives and pickles hold bytes of which `open` does not know that they stand for unknown values; the HDF5
library opens files itself.
"""

from __future__ import annotations

import functools
import os
import pickle
import sys
from collections.abc import Callable
from typing import Any

import numpy

from memexplore.virtual_gpu.files.overlay import Overlay
from memexplore.virtual_gpu.files.replacements import imported, making, write_path
from memexplore.virtual_gpu.patches.install import Replace
from memexplore.virtual_gpu.values.virtual_array import Pickled, is_of_stand_ins

H5PY = "h5py"
_ARCHIVE = ".npz"
"""What the functions that write archives add to the name of a file."""
_COMPRESSED = (".gz", ".bz2", ".xz")


def rows(overlay: Overlay) -> list[Replace]:
    """Return the replacements. Call it while nothing is replaced."""
    return [
        *(
            row
            for name in ("savez", "savez_compressed")
            for row in imported(name, getattr(numpy, name), _savez(overlay, getattr(numpy, name)))
        ),
        *imported("savetxt", numpy.savetxt, _savetxt(overlay, numpy.savetxt)),
        *imported("dump", pickle.dump, _dump(overlay, pickle.dump)),
        *(h5py_rows(overlay) if H5PY in sys.modules else ()),
    ]


def _savez(overlay: Overlay, original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def save(file: Any, *args: Any, **kwargs: Any) -> None:
        original(file, *args, **kwargs)
        if any(map(is_of_stand_ins, (*args, *kwargs.values()))):
            _note(overlay, file, _ARCHIVE)

    return save


def _savetxt(overlay: Overlay, original: Callable[..., Any]) -> Callable[..., Any]:
    """`numpy.savetxt`, which keeps the `open` that it has called first in the process."""

    @functools.wraps(original)
    def save(fname: Any, *args: Any, **kwargs: Any) -> None:
        is_path = isinstance(fname, (str, os.PathLike)) and not os.fspath(fname).endswith(_COMPRESSED)
        if is_path and not overlay.inside:
            with open(fname, "w", encoding=kwargs.get("encoding")) as file:
                original(file, *args, **kwargs)
        else:
            original(fname, *args, **kwargs)
        if any(map(is_of_stand_ins, (*args, *kwargs.values()))):
            _note(overlay, fname)

    return save


def _dump(overlay: Overlay, original: Callable[..., Any]) -> Callable[..., Any]:
    """`pickle.dump`, which finds arrays at any depth."""

    @functools.wraps(original)
    def dump(obj: Any, file: Any, *args: Any, **kwargs: Any) -> None:
        before = Pickled.arrays
        original(obj, file, *args, **kwargs)
        if Pickled.arrays > before:
            _note(overlay, file)

    return dump


def _note(overlay: Overlay, file: Any, suffix: str = "") -> None:
    """Note that a file, given as a path or open, has stand-ins for unknown values."""
    name = getattr(file, "name", file)
    if overlay.inside or not isinstance(name, (str, bytes, os.PathLike)):
        return
    path = os.fsdecode(name)
    with overlay.real():
        logical = overlay.logical(path if file is not name or path.endswith(suffix) else path + suffix)
    overlay.note_unknown(logical)


def h5py_rows(overlay: Overlay) -> list[Replace]:
    """Return the replacements in h5py, which the program has imported."""
    library: Any = sys.modules[H5PY]
    opening = library.h5f
    return [
        Replace(opening, "open", _open(overlay, opening.open, opening.ACC_RDWR)),
        Replace(opening, "create", _create(overlay, opening.create, opening.ACC_EXCL)),
        Replace(library.Group, "create_dataset", _creating_dataset(overlay, library.Group.create_dataset)),
        Replace(library.Dataset, "__setitem__", _setting(overlay, library.Dataset.__setitem__)),
    ]


def _open(overlay: Overlay, original: Callable[..., Any], writes: int) -> Callable[..., Any]:
    @functools.wraps(original)
    def open_file(name: bytes, flags: int = writes, *args: Any, **kwargs: Any) -> Any:
        if overlay.inside:
            return original(name, flags, *args, **kwargs)
        path = os.fsdecode(name)
        if flags & writes and os.path.exists(path):
            path = write_path(overlay, path, keep=True)
        elif overlay.changed:
            path = overlay.for_reading(path)
        return original(os.fsencode(path), flags, *args, **kwargs)

    return open_file


def _create(overlay: Overlay, original: Callable[..., Any], is_new: int) -> Callable[..., Any]:
    @functools.wraps(original)
    def create(name: bytes, flags: int = 0, *args: Any, **kwargs: Any) -> Any:
        if overlay.inside:
            return original(name, flags, *args, **kwargs)
        path = os.fsdecode(name)
        with making(overlay, path):
            place = write_path(overlay, path, keep=False, new=bool(flags & is_new))
            return original(os.fsencode(place), flags, *args, **kwargs)

    return create


def _creating_dataset(overlay: Overlay, original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def create_dataset(self: Any, *args: Any, **kwargs: Any) -> Any:
        result = original(self, *args, **kwargs)
        if any(map(is_of_stand_ins, (*args, *kwargs.values()))):
            _note(overlay, self.file.filename)
        return result

    return create_dataset


def _setting(overlay: Overlay, original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def set_item(self: Any, index: Any, value: Any) -> None:
        original(self, index, value)
        if is_of_stand_ins(value):
            _note(overlay, self.file.filename)

    return set_item


__all__ = ["H5PY", "h5py_rows", "rows"]
