"""Put the overlay below `open` and the functions of `os` and `shutil` that change or read files by name.

A path given as a number and one relative to an open folder (`dir_fd`) are passed on, and so are folders in bytes that
are listed. Before the first change every read is passed on unchanged.
"""

from __future__ import annotations

import builtins
import contextlib
import errno
import functools
import glob
import io
import itertools
import operator
import os
import shutil
import sys
import types
from collections.abc import Callable, Iterator
from typing import Any

from memexplore.virtual_gpu.files import elsewhere, folders, holes, paths, policy
from memexplore.virtual_gpu.files.overlay import Overlay
from memexplore.virtual_gpu.patches.install import Replace

_READS = ("stat", "access", "chdir", "listxattr", "getxattr", "statvfs", "pathconf")
_READS_LINKS = ("lstat", "readlink")
_ATTRIBUTES = ("chmod", "utime", "setxattr", "removexattr", "chown")

OS_NAMES = tuple(
    name
    for name in (
        *_READS, *_READS_LINKS, *_ATTRIBUTES, "listdir", "scandir", "open", "truncate", "mkdir", "rmdir", "remove",
        "unlink", "rename", "replace", "link", "symlink",
    )
    if hasattr(os, name)
)  # fmt: skip
"""Functions of `os` that are replaced."""


def rows(overlay: Overlay) -> list[Replace]:
    """Return the replacements of `open`, `os` and `shutil`. Call it while nothing is replaced."""
    opened = _open(overlay, builtins.open)
    functions: dict[str, Callable[..., Any]] = {
        **{name: _read(overlay, getattr(os, name), True) for name in _READS if hasattr(os, name)},
        **{name: _read(overlay, getattr(os, name), False) for name in _READS_LINKS},
        **{name: _attribute(overlay, getattr(os, name)) for name in _ATTRIBUTES if hasattr(os, name)},
        "stat": _stat(overlay, os.stat),
        "listdir": _listdir(overlay, os.listdir),
        "scandir": _scandir(overlay, os.scandir),
        "open": _os_open(overlay, os.open),
        "truncate": _truncate(overlay, os.truncate),
        "mkdir": _mkdir(overlay, os.mkdir),
        "rmdir": _remove(overlay, os.rmdir, overlay.remove_folder),
        "remove": _remove(overlay, os.remove, overlay.remove),
        "unlink": _remove(overlay, os.unlink, overlay.remove),
        "rename": _rename(overlay, os.rename),
        "replace": _rename(overlay, os.replace),
        "link": _link(overlay, os.link),
        "symlink": _symlink(overlay, os.symlink),
    }
    followed = {function for name, function in functions.items() if getattr(os, name) in os.supports_follow_symlinks}
    return [
        Replace(builtins, "open", opened),
        Replace(io, "open", opened),
        # As `bz2` and `tarfile` of the standard library import it.
        *(row for name in ("_builtin_open", "bltn_open") for row in imported(name, builtins.open, opened)),
        *imported("rmtree", shutil.rmtree, _rmtree(overlay, shutil.rmtree)),
        *(Replace(os, name, function) for name, function in functions.items()),
        *_kept_by_pathlib(functions),
        # `shutil` copies permissions of links only with functions in this set.
        Replace(os, "supports_follow_symlinks", os.supports_follow_symlinks | followed),
        # Names that other modules imported from shutil: without folders as numbers every call names a path.
        Replace(shutil, "_use_fd_functions", False),
    ]


def _kept_by_pathlib(functions: dict[str, Callable[..., Any]]) -> list[Replace]:
    """Return replacements of the functions of `os` that the class behind `Path.glob` has from Python 3.13 on."""
    kept = getattr(glob, "_StringGlobber", None)
    names = () if kept is None else (name for name in ("lstat", "scandir") if name in vars(kept))
    return [Replace(kept, name, staticmethod(functions[name])) for name in names]


def imported(name: str, original: Any, replacement: Any) -> list[Replace]:
    """Return replacements of a function in every module that has it under a name."""
    # Without a line of Python for each of thousands of modules.
    modules = list(filter(functools.partial(type.__instancecheck__, types.ModuleType), list(sys.modules.values())))
    values = map(operator.methodcaller("get", name), map(vars, modules))
    owners = itertools.compress(modules, map(operator.is_, values, itertools.repeat(original)))
    return [Replace(module, name, replacement) for module in owners]


def imported_rows(rows: list[Replace]) -> list[Replace]:
    """Return replacements of the functions of `os` in `rows` that the notebook or script has imported by name."""
    main = sys.modules["__main__"]
    replaced = {id(vars(row.owner)[row.name]): row.replacement for row in rows if row.owner is os}
    return [Replace(main, name, replaced[id(value)]) for name, value in vars(main).items() if id(value) in replaced]


def _passes(overlay: Overlay, *given: Any, **keywords: Any) -> bool:
    """Whether a call is passed on: it is the overlay's own, or its path is a number."""
    if overlay.inside or any(keywords.get(name) is not None for name in ("dir_fd", "src_dir_fd", "dst_dir_fd")):
        return True
    return not all(isinstance(path, (str, bytes, os.PathLike)) for path in given)


def _logical(overlay: Overlay, path: Any, follow: bool = True) -> str:
    with overlay.real():
        return overlay.logical(os.fsdecode(path), follow)


def _in_place(overlay: Overlay, *places: tuple[Any, str]) -> list[str]:
    """Return the paths on disk of pairs of a path and its logical path, whose last parts are not followed."""
    return [overlay.in_place(os.fsdecode(path), logical, follow=False) for path, logical in places]


# --- reads ---------------------------------------------------------------------------------------------------------


def _read(overlay: Overlay, original: Callable[..., Any], follow: bool) -> Callable[..., Any]:
    @functools.wraps(original)
    def read(path: Any, *args: Any, **kwargs: Any) -> Any:
        if not overlay.changed or _passes(overlay, path, **kwargs):
            return original(path, *args, **kwargs)
        try:
            place = overlay.for_reading(os.fsdecode(path), follow and kwargs.get("follow_symlinks", True))
        except OSError:
            if original.__name__ == "access":
                return False
            raise
        result = original(place, *args, **kwargs)
        # `readlink` returns what it is given.
        return os.fsencode(result) if isinstance(path, bytes) and isinstance(result, str) else result

    return read


def _stat(overlay: Overlay, original: Callable[..., Any]) -> Callable[..., Any]:
    """Return `os.stat`, by which `os.path.exists` and the like look for a file."""
    read = _read(overlay, original, True)

    @functools.wraps(original)
    def stat(path: Any, *args: Any, **kwargs: Any) -> Any:
        try:
            return read(path, *args, **kwargs)
        except FileNotFoundError:
            if _passes(overlay, path, **kwargs):
                raise
            copy = elsewhere.fetched_beside_own_files(overlay, path) or elsewhere.fetched_when_awaited(overlay, path)
            if copy is None:
                raise
        return original(copy, *args, **kwargs)

    return stat


def _listdir(overlay: Overlay, original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def listdir(path: Any = ".") -> Any:
        path = "." if path is None else path
        if not overlay.changed or isinstance(path, bytes) or _passes(overlay, path):
            return original(path)
        return overlay.names(_logical(overlay, path))

    return listdir


def _scandir(overlay: Overlay, original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def scandir(path: Any = ".") -> Any:
        path = "." if path is None else path
        if not overlay.changed or isinstance(path, bytes) or _passes(overlay, path):
            return original(path)
        return folders.entries(overlay, os.fsdecode(path))

    return scandir


# --- opening -------------------------------------------------------------------------------------------------------


def _open(overlay: Overlay, original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def open_file(file: Any, mode: str = "r", *args: Any, **kwargs: Any) -> Any:
        if not isinstance(mode, str) or kwargs.get("opener") is not None or _passes(overlay, file):
            return original(file, mode, *args, **kwargs)
        if not set(mode) & set("wax+"):
            try:
                seen = overlay.for_reading(os.fsdecode(file)) if overlay.changed else file
                return original(seen, mode, *args, **kwargs)
            except FileNotFoundError:
                copy = elsewhere.fetched(overlay, file)
                if copy is None:
                    raise
            return original(copy, mode, *args, **kwargs)
        with making(overlay, file):
            logical = _logical(overlay, file)
            opened = original(write_path(overlay, file, "w" not in mode, "x" in mode), mode, *args, **kwargs)
            if "w" in mode:
                overlay.hollow.discard(logical)
            return holes.with_holes(opened, functools.partial(overlay.note_unknown, logical))

    return open_file


@contextlib.contextmanager
def making(overlay: Overlay, path: Any, follow: bool = True) -> Iterator[None]:
    """Let a file or folder that the block makes in place belong to the program, in `memexplore run`.

    An interrupt leaves it to the user, whose files the program does not change.
    """
    is_run = overlay.policy is policy.every_file and not overlay.inside
    logical = _logical(overlay, path, follow) if is_run else ""
    with overlay.real():
        is_new = bool(logical) and not os.path.lexists(logical) and policy.is_output(logical)
    yield
    if is_new:
        with overlay.real(), overlay.lock:
            if os.path.lexists(logical):
                overlay.own.add(logical)


def write_path(overlay: Overlay, file: Any, keep: bool, new: bool = False) -> Any:
    """Return the path to open for writing: in the overlay if the change goes there, else the given one.

    `keep` begins with the present content. Raises FileExistsError for a `new` file that exists.
    """
    with overlay.real():
        # A link that leads nowhere is a file too.
        if new and overlay.located(overlay.logical(os.fsdecode(file), follow=False)) is not None:
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), os.fsdecode(file))
        logical = overlay.logical(os.fsdecode(file))
    if not overlay.diverts(logical):
        return overlay.in_place(os.fsdecode(file), logical)
    return overlay.for_writing(logical, keep)


def _os_open(overlay: Overlay, original: Callable[..., Any]) -> Callable[..., Any]:
    writing = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND
    nameless = getattr(os, "O_TMPFILE", 0)

    @functools.wraps(original)
    def open_file(path: Any, flags: int, *args: Any, **kwargs: Any) -> int:
        if _passes(overlay, path, **kwargs) or (nameless and flags & nameless == nameless):
            return original(path, flags, *args, **kwargs)
        if not flags & writing:
            return original(overlay.for_reading(os.fsdecode(path)) if overlay.changed else path, flags, *args, **kwargs)
        new = flags & os.O_CREAT and flags & os.O_EXCL
        if not flags & os.O_CREAT:
            with overlay.real():
                missing = overlay.located(overlay.logical(os.fsdecode(path))) is None
            if missing:
                return original(overlay.for_reading(os.fsdecode(path)), flags, *args, **kwargs)
        # Without O_CREAT the copy must exist, and the call itself empties it.
        keep = not (flags & os.O_CREAT and flags & os.O_TRUNC)
        with making(overlay, path):
            return original(write_path(overlay, path, keep, bool(new)), flags, *args, **kwargs)

    return open_file


def _truncate(overlay: Overlay, original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def truncate(path: Any, length: int) -> None:
        if not _passes(overlay, path):
            path = write_path(overlay, path, keep=True)
        original(path, length)

    return truncate


# --- other changes -------------------------------------------------------------------------------------------------


def _attribute(overlay: Overlay, original: Callable[..., Any]) -> Callable[..., Any]:
    """Replace a function that changes permissions or times: without effect on a file of the user's that is kept."""

    @functools.wraps(original)
    def change(path: Any, *args: Any, **kwargs: Any) -> Any:
        if _passes(overlay, path, **kwargs):
            return original(path, *args, **kwargs)
        logical = _logical(overlay, path, kwargs.get("follow_symlinks", True))
        with overlay.real():
            place = overlay.located(logical)
        if place is not None and place != logical:
            return original(place, *args, **kwargs)
        if place is not None and overlay.policy is policy.every_file and overlay.diverts(logical):
            return None
        return original(overlay.for_reading(os.fsdecode(path), kwargs.get("follow_symlinks", True)), *args, **kwargs)

    return change


def _mkdir(overlay: Overlay, original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def mkdir(path: Any, mode: int = 0o777, **kwargs: Any) -> None:
        if _passes(overlay, path, **kwargs):
            return original(path, mode, **kwargs)
        logical = _logical(overlay, path, follow=False)
        if not overlay.diverts(logical):
            with making(overlay, path, follow=False):
                return original(*_in_place(overlay, (path, logical)), mode, **kwargs)
        return overlay.make_folder(logical, mode)

    return mkdir


def _remove(overlay: Overlay, original: Callable[..., Any], remove: Callable[[str], None]) -> Callable[..., Any]:
    @functools.wraps(original)
    def call(path: Any, **kwargs: Any) -> None:
        if _passes(overlay, path, **kwargs):
            return original(path, **kwargs)
        logical = _logical(overlay, path, follow=False)
        elsewhere.removing(overlay, logical)
        if not paths.below(overlay.gone, logical) and not overlay.diverts(logical):
            original(*_in_place(overlay, (path, logical)), **kwargs)
            return overlay.disown(logical)
        return remove(logical)

    return call


def _rename(overlay: Overlay, original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def rename(src: Any, dst: Any, **kwargs: Any) -> None:
        if _passes(overlay, src, dst, **kwargs):
            return original(src, dst, **kwargs)
        source, target = _logical(overlay, src, follow=False), _logical(overlay, dst, follow=False)
        moves = [target, source] if overlay.policy is policy.every_file else [target]
        differs = not overlay.is_on_disk(source) or paths.below(overlay.gone, source)
        if differs or any(overlay.diverts(path) for path in moves):
            return overlay.move(source, target)
        places = _in_place(overlay, (src, source), (dst, target))
        with making(overlay, dst, follow=False):
            original(*places, **kwargs)
        return overlay.note_renamed(source, target)

    return rename


def _link(overlay: Overlay, original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def link(src: Any, dst: Any, **kwargs: Any) -> None:
        if _passes(overlay, src, dst, **kwargs):
            return original(src, dst, **kwargs)
        source, target = _logical(overlay, src, follow=False), _logical(overlay, dst, follow=False)
        makes_writable = overlay.policy is policy.every_file and overlay.diverts(source)
        if overlay.is_on_disk(source) and not overlay.diverts(target) and not makes_writable:
            places = _in_place(overlay, (src, source), (dst, target))
            with making(overlay, dst, follow=False):
                return original(*places, **kwargs)
        with overlay.real():
            if overlay.located(target) is not None:
                raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), src, None, dst)
            # A copy, because a change of the link would be a change of the user's file.
            place = overlay.for_reading(source, follow=False)
            shutil.copy2(place, overlay.for_writing(target, keep=False), follow_symlinks=False)
        return None

    return link


def _symlink(overlay: Overlay, original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def symlink(src: Any, dst: Any, *args: Any, **kwargs: Any) -> None:
        if _passes(overlay, src, dst, **kwargs):
            return original(src, dst, *args, **kwargs)
        target = _logical(overlay, dst, follow=False)
        if not overlay.diverts(target):
            with making(overlay, dst, follow=False):
                return original(src, *_in_place(overlay, (dst, target)), *args, **kwargs)
        return overlay.link(os.fsdecode(src), target)

    return symlink


def _rmtree(overlay: Overlay, original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def rmtree(path: Any, *args: Any, **kwargs: Any) -> None:
        if _passes(overlay, path, **kwargs):
            return original(path, *args, **kwargs)
        logical = _logical(overlay, path, follow=False)
        with overlay.real():
            place = overlay.located(logical)
            is_tree = place is not None and os.path.isdir(place) and not os.path.islink(place)
            # A folder with a checkpoint is kept as a whole, its settings and logs included.
            holds_values = is_tree and not overlay.is_own(logical) and policy.tree_holds_values(logical)
            hide = is_tree and (holds_values or overlay.diverts(logical))
        if hide:
            return overlay.remove_tree(logical)
        original(*_in_place(overlay, (path, logical)), *args, **kwargs)
        return overlay.disown(logical)

    return rmtree
