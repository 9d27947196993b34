"""Take paths apart, and tell what a file on disk is."""

from __future__ import annotations

import contextlib
import os
import shutil
import stat
from collections.abc import Iterable

_MARK_WITHIN = 2**20
"""Bytes of a file searched for the mark: the pickle of `torch.save` precedes the values of other tensors."""


def holds_mark(path: str, mark: bytes) -> bool:
    """Whether a file contains the mark of tensors without values near its beginning."""
    try:
        with open(path, "rb") as file:
            return mark in file.read(_MARK_WITHIN)
    except OSError:
        return False


def is_pickled(path: str) -> bool:
    """Whether a file begins as a pickle or as an archive of `torch.save`: a text may name the mark."""
    try:
        if not stat.S_ISREG(os.lstat(path).st_mode):
            return False
        with open(path, "rb") as file:
            return file.read(4).startswith((b"PK\x03\x04", b"\x80"))
    except OSError:
        return False


def delete(path: str) -> None:
    """Delete a file, or a folder with everything in it."""
    shutil.rmtree(path) if is_folder(path) else os.remove(path)


def below(paths: Iterable[str], logical: str) -> list[str]:
    """Return those of the paths that are a logical path or below it."""
    return [path for path in paths if path == logical or path.startswith(logical + os.sep)]


def parts(tail: str) -> list[str]:
    """Return the names in a path without its drive."""
    return [part for part in tail.replace(os.sep, "/").split("/") if part not in ("", os.curdir)]


def with_folders(path: str) -> list[str]:
    """Return a path and those of all folders above it."""
    parent = os.path.dirname(path)
    return [path] if parent == path else [path, *with_folders(parent)]


def remove_emptied(folders: Iterable[str], files: Iterable[str]) -> None:
    """Delete those of the folders that are above files and empty on disk: a second run would look for the files."""
    above = {folder for file in files for folder in with_folders(file)}
    # A folder sorts before what is in it.
    for folder in sorted(above.intersection(folders), reverse=True):
        with contextlib.suppress(OSError):
            os.rmdir(folder)


def is_folder(path: str) -> bool:
    """Whether a path is a folder, and no link to one."""
    return stat.S_ISDIR(os.lstat(path).st_mode)
