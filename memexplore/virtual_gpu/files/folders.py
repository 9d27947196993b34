"""List folders whose files lie in two places, the user's and the overlay: `os.scandir`."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

from memexplore.virtual_gpu.files.overlay import Overlay


class Entry:
    """An entry of a folder as `os.DirEntry` has it, with the path that the program knows."""

    def __init__(self, overlay: Overlay, folder: str, name: str, place: str) -> None:
        self._overlay = overlay
        self._place = place
        self.name = name
        self.path = os.path.join(folder, name)

    def __fspath__(self) -> str:
        return self.path

    def __repr__(self) -> str:
        return f"<DirEntry {self.name!r}>"

    def _target(self, follow: bool) -> str:
        return self._overlay.for_reading(self.path, follow) if follow else self._place

    def stat(self, *, follow_symlinks: bool = True) -> os.stat_result:
        """Return the status of the file."""
        target = self._target(follow_symlinks)
        with self._overlay.real():
            return os.stat(target, follow_symlinks=follow_symlinks)

    def inode(self) -> int:
        """Return the number of the file in its file system."""
        return self.stat(follow_symlinks=False).st_ino

    def is_dir(self, *, follow_symlinks: bool = True) -> bool:
        """Whether the entry is a folder."""
        target = self._target(follow_symlinks)
        with self._overlay.real():
            return os.path.isdir(target) and (follow_symlinks or not os.path.islink(target))

    def is_file(self, *, follow_symlinks: bool = True) -> bool:
        """Whether the entry is a regular file."""
        target = self._target(follow_symlinks)
        with self._overlay.real():
            return os.path.isfile(target) and (follow_symlinks or not os.path.islink(target))

    def is_symlink(self) -> bool:
        """Whether the entry is a symbolic link."""
        with self._overlay.real():
            return os.path.islink(self._place)

    def is_junction(self) -> bool:
        """Whether the entry is a junction of Windows."""
        return False


class Entries:
    """The iterator that `os.scandir` returns."""

    def __init__(self, entries: list[Entry]) -> None:
        self._entries = iter(entries)

    def __iter__(self) -> Iterator[Entry]:
        return self

    def __next__(self) -> Entry:
        return next(self._entries)

    def __enter__(self) -> Entries:
        return self

    def __exit__(self, *error: Any) -> None:
        self.close()

    def close(self) -> None:
        """End the iteration."""
        self._entries = iter(())


def entries(overlay: Overlay, folder: str) -> Entries:
    """Return the entries of a folder as the program sees them.

    Raises OSError as `os.scandir` does.
    """
    with overlay.real():
        logical = overlay.logical(folder)
        merged = []
        for name in overlay.names(logical):
            place = overlay.located(os.path.join(logical, name))
            if place is not None:
                merged.append(Entry(overlay, folder, name, place))
        return Entries(merged)
