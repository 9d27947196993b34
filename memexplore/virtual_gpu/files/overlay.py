"""Find the place of each file of a program: the user's file, or its changed copy in the overlay.

The overlay is a temporary folder that mirrors absolute paths. A changed file exists there in place of the user's file;
a deleted file of the user's is only listed as deleted. The functions of `os` that this file calls are the real ones:
`inside` marks the thread, and the replacements in `replacements.py` then pass every call on.
"""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import threading
from collections.abc import Callable, Iterator

from memexplore.virtual_gpu.files import ownership, paths

_MAX_LINKS = 40
"""Symbolic links followed in one path; Linux has the same limit."""


Policy = Callable[["Overlay", str], bool]


class _Thread(threading.local):
    """Mark of a thread that runs calls of the overlay itself."""

    inside = False


class Overlay:
    """The user's files below, the changed ones above.

    A logical path is absolute, without symbolic links except in its last part when links are not followed.
    """

    def __init__(self, mark: bytes) -> None:
        self.mark = mark
        """Bytes that a file of tensors without values contains."""
        self.closed = True
        """Whether every call is passed on, because no virtual GPU is on."""
        self.begin(lambda overlay, logical: False)

    def begin(self, policy: Policy) -> None:
        """Start empty, with a policy: from the overlay and a logical path to whether a change of it goes here."""
        self.policy = policy
        # New ones, because an interrupt can leave a mark set, and then every call would be passed on.
        self.lock = threading.RLock()
        self._thread = _Thread()
        self.temporary = ""
        """The folder of temporary files at the beginning; empty if there is none."""
        self.root = ""
        """The folder of the overlay, made at the first change; empty before."""
        self._owner = -1
        """The file that marks the folder as in use, while the overlay is open."""
        self.gone: set[str] = set()
        """Logical paths of the user's files and folders that the program deleted or replaced."""
        self.written: dict[str, bool] = {}
        """Logical paths of files in the overlay, and whether their tensors have no values."""
        self.own: set[str] = set()
        """Logical paths of files and folders that the program made in place: it may change and delete them there."""
        self.hollow: set[str] = set()
        """Logical paths of files that the program wrote in place and that have zeros for unknown values."""
        self.changed = False
        """Whether a path can differ from the user's; reads are passed on unchanged before."""
        self.on_first_change: Callable[[str], object] = lambda logical: None
        """Called with the logical path of the first file that goes to the overlay."""
        self._process = os.getpid()

    # -- calls of the overlay itself

    @property
    def inside(self) -> bool:
        """Whether this thread runs a call of the overlay itself or of memexplore, or no virtual GPU is on."""
        return self.closed or self._thread.inside

    @contextlib.contextmanager
    def real(self) -> Iterator[None]:
        """Let the file functions of this thread work on the real files."""
        before = self._thread.inside
        try:
            self._thread.inside = True
            yield
        finally:
            self._thread.inside = before

    def diverts(self, logical: str) -> bool:
        """Whether a change of a file goes to the overlay."""
        with self.real():
            return self.policy(self, logical)

    # -- paths

    def upper(self, logical: str) -> str:
        """Return the path in the overlay that stands for a logical path."""
        drive, tail = os.path.splitdrive(logical)
        return os.path.join(self.root, drive.strip(":\\/").replace("\\", "_"), tail.lstrip("/\\"))

    def hidden(self, logical: str) -> bool:
        """Whether the program deleted the user's file, or a folder above it."""
        return bool(self.gone) and not self.gone.isdisjoint(paths.with_folders(logical))

    def located(self, logical: str) -> str | None:
        """Return the path of the file that the program sees: in the overlay, else the user's, else None."""
        if self.root:
            upper = self.upper(logical)
            if os.path.lexists(upper):
                return upper
        return logical if os.path.lexists(logical) and not self.hidden(logical) else None

    def in_overlay(self, logical: str) -> bool:
        """Whether the overlay has a file or folder for a logical path."""
        return bool(self.root) and os.path.lexists(self.upper(logical))

    def is_on_disk(self, logical: str) -> bool:
        """Whether the program sees a path as it is on disk, where it may be missing."""
        return not self.in_overlay(logical) and not self.hidden(logical)

    def logical(self, path: str, follow: bool = True) -> str:
        """Return the logical path of a path of the program; `follow` resolves a link in its last part too.

        Raises OSError for a loop of links.
        """
        path = os.path.join(os.getcwd(), path)
        if self.root and path.startswith(self.root + os.sep):
            path = path[len(self.root) :]
        drive, tail = os.path.splitdrive(path)
        start = drive + os.sep
        current, waiting, links = start, paths.parts(tail), 0
        while waiting:
            name = waiting.pop(0)
            if name == os.pardir:
                # Above the folder that a link leads to, as the system has it, not above the link.
                folder = self.located(current)
                if folder is None or not os.path.isdir(folder):
                    return os.path.join(current, name, *waiting)
                current = os.path.dirname(current)
                continue
            candidate = os.path.join(current, name)
            if not waiting and not follow:
                return candidate
            place = self.located(candidate)
            if place is None or not os.path.islink(place):
                current = candidate
                continue
            links += 1
            if links > _MAX_LINKS:
                raise OSError(errno.ELOOP, os.strerror(errno.ELOOP), path)
            target = os.path.join(current, os.readlink(place))
            current, waiting = start, paths.parts(os.path.splitdrive(target)[1]) + waiting
        return current

    def for_reading(self, path: str, follow: bool = True) -> str:
        """Return the path to read in place of a path of the program.

        Raises FileNotFoundError for a file that the program deleted.
        """
        with self.real():
            logical = self.logical(path, follow)
            place = self.located(logical)
            if place is None and self.hidden(logical):
                raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), path)
            return self.in_place(path, logical, follow) if place in (None, logical) else str(place)

    def in_place(self, path: str, logical: str, follow: bool = True) -> str:
        """Return the path of a logical path on disk, where a link of the program's can be a file of the user's."""
        with self.real():
            if not self.changed:
                return path
            folder, name = os.path.split(path)
            on_disk = os.path.realpath(path) if follow else os.path.join(os.path.realpath(folder), name)
            # A folder before `..` may be one of the program's that is not on disk.
            return path if on_disk == logical and os.pardir not in path else logical

    def is_own(self, logical: str) -> bool:
        """Whether the program made a file in place, or a folder above it."""
        return bool(self.own) and not self.own.isdisjoint(paths.with_folders(logical))

    # -- changes

    def make_room(self, logical: str) -> str:
        """Make the folders above a path in the overlay, and return its path there."""
        if not self.root:
            self.root, self._owner = ownership.make(self.temporary, self.mark)
            self.changed = True
        os.makedirs(os.path.dirname(self.upper(logical)), exist_ok=True)
        return self.upper(logical)

    def parent_refuses(self, logical: str) -> bool:
        """Whether the real call would fail, because the folder of a path is missing, no folder or not writable."""
        parent = self.located(os.path.dirname(logical))
        return parent is None or not os.path.isdir(parent) or not os.access(parent, os.W_OK)

    def for_writing(self, logical: str, keep: bool, valueless: bool = False) -> str:
        """Return the path in the overlay to write; with `keep` it begins as a copy of the file that the program sees.

        For a file that the real call would refuse the result is a path at which that call fails in the same way.
        """
        with self.real(), self.lock:
            lower = logical if os.path.lexists(logical) and not self.hidden(logical) else None
            if not self.in_overlay(logical):
                # A file may be written in a folder that takes no new ones.
                if lower and (os.path.isdir(lower) or not os.access(lower, os.W_OK)):
                    return lower
                if not lower and self.parent_refuses(logical):
                    return self._refusing(logical)
                upper = self.make_room(logical)
                if lower and keep:
                    shutil.copy2(lower, upper)
            if not self.written:
                self.on_first_change(logical)
            self.written[logical] = valueless
            return self.upper(logical)

    def _refusing(self, logical: str) -> str:
        """Return the path at which a new file or folder fails as it should; its folder in the overlay comes first."""
        if self.in_overlay(os.path.dirname(logical)):
            return self.upper(logical)
        if self.hidden(logical):
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), logical)
        return logical

    def make_folder(self, logical: str, mode: int) -> None:
        """Make a folder in the overlay.

        Raises OSError as `os.mkdir` does.
        """
        with self.real(), self.lock:
            if self.located(logical) is not None:
                raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), logical)
            if self.parent_refuses(logical):
                os.mkdir(self._refusing(logical), mode)
                return
            os.mkdir(self.make_room(logical), mode)

    def remove(self, logical: str) -> None:
        """Delete a file: from the overlay, and from the user's files only in the program's view.

        Raises OSError as `os.remove` does.
        """
        with self.real(), self.lock:
            place = self.located(logical)
            if place is None:
                raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), logical)
            if os.path.isdir(place) and not os.path.islink(place):
                raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), logical)
            self._forget(logical)

    def remove_folder(self, logical: str) -> None:
        """Delete an empty folder, as `remove` deletes a file.

        Raises OSError as `os.rmdir` does.
        """
        with self.real(), self.lock:
            place = self.located(logical)
            if place is None:
                raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), logical)
            if not os.path.isdir(place) or os.path.islink(place):
                raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), logical)
            if self.names(logical):
                raise OSError(errno.ENOTEMPTY, os.strerror(errno.ENOTEMPTY), logical)
            self._forget(logical)

    def remove_tree(self, logical: str) -> None:
        """Delete a folder with everything in it, as `remove` deletes a file."""
        with self.real(), self.lock:
            self._forget(logical)

    def _forget(self, logical: str) -> None:
        """Drop a path from the overlay, and hide the user's file of the same path; a file of the program is deleted."""
        upper = self.upper(logical) if self.root else ""
        if os.path.lexists(logical) and not self.hidden(logical):
            if self.is_own(logical):
                paths.delete(logical)
                self.disown(logical)
            else:
                self.changed = True
                self.gone.add(logical)
        if upper and os.path.isdir(upper) and not os.path.islink(upper):
            shutil.rmtree(upper)
        elif upper and os.path.lexists(upper):
            os.remove(upper)
        for path in paths.below(self.written, logical):
            del self.written[path]

    def disown(self, logical: str) -> None:
        """Note that a path that the program made in place, and all below it, exist no more."""
        self.own.difference_update(paths.below(self.own, logical))
        self.hollow.difference_update(paths.below(self.hollow, logical))

    def note_unknown(self, logical: str) -> None:
        """Note that the program has written unknown values to a file."""
        if logical in self.written:
            self.written[logical] = True
        else:
            self.hollow.add(logical)

    def note_renamed(self, source: str, target: str) -> None:
        """Note that a file or folder that the program may have made in place has another name."""
        if source != target:
            hollow = {target + path[len(source) :] for path in paths.below(self.hollow, source)}
            self.hollow.discard(target)
            self.hollow |= hollow
            self.disown(source)

    def names(self, logical: str) -> list[str]:
        """Return the names in a folder as the program sees them.

        Raises OSError as `os.listdir` does.
        """
        with self.real(), self.lock:
            place = self.located(logical)
            if place is None:
                raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), logical)
            above = [name for name in os.listdir(place) if name != ownership.MARK] if place != logical else []
            if place != logical and (self.hidden(logical) or not os.path.isdir(logical)):
                return above
            seen = set(above)
            below = [name for name in os.listdir(logical) if name not in seen]
            return above + [name for name in below if os.path.join(logical, name) not in self.gone]

    def move(self, source: str, target: str) -> None:
        """Rename a file or folder in the program's view; the user's files stay, so theirs are copied.

        Raises OSError as `os.replace` does.
        """
        with self.real(), self.lock:
            place, replaced = self.located(source), self.located(target)
            if place is None:
                raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), source, None, target)
            if self.parent_refuses(target):
                os.replace(place, self._refusing(target))
                return
            if source == target:
                return
            if target.startswith(source + os.sep):
                raise OSError(errno.EINVAL, os.strerror(errno.EINVAL), source, None, target)
            is_folder = paths.is_folder(place)
            if replaced is not None and is_folder != paths.is_folder(replaced):
                code = errno.ENOTDIR if is_folder else errno.EISDIR
                raise OSError(code, os.strerror(code), source, None, target)
            if replaced is not None and is_folder and self.names(target):
                raise OSError(errno.ENOTEMPTY, os.strerror(errno.ENOTEMPTY), source, None, target)
            self.make_room(target)
            moved = {path: flag for path, flag in self.written.items() if (path + os.sep).startswith(source + os.sep)}
            if replaced is not None:
                self._forget(target)
            if place != source and not (is_folder and os.path.isdir(source) and not self.hidden(source)):
                os.replace(place, self.upper(target))
            else:
                self._copy(source, target)
                moved.setdefault(source, source in self.hollow)
            is_users = is_folder or (self.policy(self, source) and not paths.holds_mark(source, self.mark))
            if place == source and not is_users:
                # A file that the program made in place, such as one of `tempfile`.
                os.remove(source)
                self.disown(source)
            self._forget(source)
            self.written |= {target + path[len(source) :]: flag for path, flag in moved.items()}

    def _copy(self, source: str, target: str) -> None:
        """Copy what the program sees at a path to another path of the overlay."""
        place = self.located(source)
        assert place is not None
        if paths.is_folder(place):
            os.makedirs(self.upper(target), exist_ok=True)
            for name in self.names(source):
                self._copy(os.path.join(source, name), os.path.join(target, name))
        else:
            shutil.copy2(place, self.upper(target), follow_symlinks=False)

    def link(self, text: str, logical: str) -> None:
        """Make a symbolic link in the overlay.

        Raises OSError as `os.symlink` does.
        """
        with self.real(), self.lock:
            if self.located(logical) is not None:
                raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), text, None, logical)
            if self.parent_refuses(logical):
                os.symlink(text, self._refusing(logical))
                return
            os.symlink(text, self.make_room(logical))

    # -- the end

    def close(self) -> None:
        """Delete the files whose tensors have no values, and the overlay if it has no other file. May run twice."""
        self.closed = True
        if os.getpid() != self._process:
            return
        with self.real(), self.lock:
            for logical in self.own_without_values():
                self.written[logical] = True
                with contextlib.suppress(OSError):
                    os.remove(logical)
                    self.own.discard(logical)
            paths.remove_emptied(self.own, self.written)
            if not self.root:
                return
            for logical in list(self.written):
                upper = self.upper(logical)
                self.written[logical] = self.written[logical] or paths.holds_mark(upper, self.mark)
                if self.written[logical]:
                    with contextlib.suppress(OSError):
                        os.remove(upper)
            self._owner = ownership.release(self.root, self._owner)
            kept = any(files for _, _, files in os.walk(self.root))
            if not kept:
                shutil.rmtree(self.root, ignore_errors=True)

    def own_without_values(self) -> list[str]:
        """Return the files made in place that hold tensors without values, such as pickles of a module."""
        return [path for path in sorted(self.own) if path in self.hollow or self._is_marked(path)]

    def _is_marked(self, path: str) -> bool:
        return paths.is_pickled(path) and paths.holds_mark(path, self.mark)


__all__ = ["Overlay"]
