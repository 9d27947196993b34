"""Keep the files of a virtual GPU while it is on: its overlay, the patches for it, and the sentences that report it."""

from __future__ import annotations

import atexit
import builtins
import contextlib
import functools
import os
import shutil
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch

from memexplore.virtual_gpu.files import (
    array_files,
    paths,
    policy,
    replacements,
    safetensors_files,
    script_module_files,
    tensor_files,
    tokenizer_files,
)
from memexplore.virtual_gpu.files.overlay import Overlay, Policy
from memexplore.virtual_gpu.patches import install
from memexplore.virtual_gpu.patches.install import Call, Patch, Replace, ReplaceTogether
from memexplore.virtual_gpu.tensors.saved import saved_on_a_virtual_gpu_without_values

_policy: Policy = policy.tensors_only
_overlay = Overlay(saved_on_a_virtual_gpu_without_values.__name__.encode())
"""One for the process: a function that a program imported while a virtual GPU was on serves the next one too."""
_NAMED = 3
"""Files that a report names."""


@contextlib.contextmanager
def every_file() -> Iterator[None]:
    """Let a virtual GPU that is turned on in the block keep changes of all the user's files in the overlay."""
    global _policy
    before, _policy = _policy, policy.every_file
    try:
        yield
    finally:
        _policy = before


def patches() -> list[Patch]:
    """Return the patches for an empty overlay. Call it while nothing is replaced."""
    rows, together = _replaced(tuple(map(id, list(sys.modules.values()))), *map(getattr, _OWNERS, _NAMES))
    main_names = map(id, vars(sys.modules["__main__"]).values())
    return [
        Call(partial(_begin, _policy), _overlay.close),
        together,
        *(replacements.imported_rows(rows) if not _IDS.isdisjoint(main_names) else ()),
    ]


_OWNERS = (builtins, shutil, torch, *(os for _ in replacements.OS_NAMES))
_NAMES = ("open", "rmtree", "save", *replacements.OS_NAMES)
_IDS = set(map(id, map(partial(getattr, os), replacements.OS_NAMES)))


@functools.lru_cache(maxsize=1)
def _replaced(modules: tuple[int, ...], *originals: Any) -> tuple[list[Replace], ReplaceTogether]:
    """Return all replacements; they are made again only if modules were imported or an original has changed."""
    libraries = (array_files, safetensors_files, script_module_files, tokenizer_files)
    makers = (tensor_files.rows, *(library.rows for library in libraries), replacements.rows)
    rows = [row for maker in makers for row in maker(_overlay)]
    return rows, ReplaceTogether(*zip(*rows, strict=True))


def _begin(diverts: Policy) -> None:
    _overlay.begin(diverts)
    with contextlib.suppress(FileNotFoundError):
        _overlay.temporary = tempfile.gettempdir()
    if diverts is policy.tensors_only:
        _overlay.on_first_change = _warn
    _overlay.closed = False


def after_import() -> dict[str, Callable[[], object]]:
    """Return what installs the patches of libraries that the program imports, by their names."""
    if array_files.H5PY in sys.modules:
        return {}
    return {array_files.H5PY: lambda: install.add(array_files.h5py_rows(_overlay))}


# A process that ends while the GPU is on, such as a kernel that is shut down.
atexit.register(_overlay.close)
tensor_files.guard()


def _warn(logical: str) -> None:
    warnings.warn(
        f"memexplore: {logical} is written to a temporary folder, because files of a program on a virtual GPU may hold "
        "tensors without values; the program reads it from there, and your own files stay unchanged",
        UserWarning,
        stacklevel=2,
    )


def read_path(path: Any) -> Any:
    """Return the path of the file that the program sees, for readers that open it outside Python."""
    return path if _overlay.inside or not _overlay.changed else _overlay.for_reading(os.fspath(path))


def written_files() -> tuple[str, ...]:
    """Return the paths of the files that the program has written and that are not kept where it wrote them."""
    with _overlay.real():
        return (*_overlay.written, *_overlay.own_without_values())


def on_disk() -> contextlib.AbstractContextManager[None]:
    """Read and write the files on the disk in a block, not those that the program sees."""
    return _overlay.real()


def has_file(path: str) -> bool:
    """Return whether the running program sees a file at a path."""
    with _overlay.real():
        return _seen(path) is not None


def _seen(path: str) -> str | None:
    place = None if _overlay.closed else _overlay.located(_overlay.logical(path))
    return place if place is not None and os.path.isfile(place) else None


def copy_file(path: str, target: str) -> bool:
    """Copy the file that the running program sees at a path; return whether there is one."""
    with _overlay.real():
        place = _seen(path)
        if place is None:
            return False
        partial = f"{target}.{os.getpid()}"
        shutil.copyfile(place, partial)
        os.replace(partial, target)
        return True


def report() -> tuple[str, ...]:
    """Return a sentence about the files that the last program wrote on a virtual GPU; none if it wrote none.

    The last program is that of the virtual GPU that is on, else of the one that was on last.
    """
    with _overlay.real():
        valueless, kept, hidden = _reported(_overlay)
        hollow = sorted(path for path in _overlay.hollow - set(valueless) if os.path.lexists(path))
    texts = []
    if valueless:
        texts.append(f"{_files(valueless)} {_were(valueless)} not kept, because the tensors have no values")
    if kept:
        texts.append(f"{_files(kept)} {_were(kept)} written to {_overlay.root}")
    if hollow:
        texts.append(f"{_files(hollow)} {_have(hollow)} zeros or ones in place of values that are not known")
    if hidden:
        texts.append(f"{_files(hidden)} {_were(hidden)} deleted by the program only, not on disk")
    return (f"Files: {'; '.join(texts)}. Your own files are unchanged.",) if texts else ()


def _reported(overlay: Overlay) -> tuple[list[str], list[str], list[str]]:
    """Return logical paths: of files without values, other written files, and hidden files of the user's."""
    valueless = {
        path
        for path, marked in overlay.written.items()
        if marked or paths.holds_mark(overlay.upper(path), overlay.mark)
    }
    valueless.update(overlay.own_without_values())
    replaced = {part for path in overlay.written for part in paths.with_folders(path)}
    hidden = [path for path in sorted(overlay.gone) if path not in replaced and os.path.lexists(path)]
    # A folder stands for what is in it.
    hidden = [path for path in hidden if not any(path.startswith(other + os.sep) for other in hidden)]
    return sorted(valueless), [path for path in overlay.written if path not in valueless], hidden


def _files(files: list[str]) -> str:
    names = [os.path.relpath(path) if path.startswith(os.getcwd() + os.sep) else path for path in files]
    more = len(names) - _NAMED
    return ", ".join(names[:_NAMED]) + (f" and {more} more" if more > 0 else "")


def _were(files: list[str]) -> str:
    return "was" if len(files) == 1 else "were"


def _have(files: list[str]) -> str:
    return "has" if len(files) == 1 else "have"


__all__ = ["after_import", "copy_file", "every_file", "patches", "read_path", "report", "written_files"]
