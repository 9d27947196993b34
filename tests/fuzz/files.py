"""Random programs that change files on a virtual GPU, against the same programs without one.

A number chooses the policy (`memexplore run` or a notebook), the files of a user and the operations. The program must
see what it sees without a virtual GPU, and afterwards the user's files must be on disk.
"""

from __future__ import annotations

import contextlib
import functools
import os
import pickle
import random
import shutil
import tempfile
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import memexplore as mx
from memexplore.virtual_gpu.files import session

FOLDERS = ("d", "d/f", "e")
FILES = ("a", "b", "d/x", "d/y", "e/z", "d/f/g")
NAMES = (*FILES, *FOLDERS, "l", "n", "n/m")
LINKS = ("a", "d", "d/x", "missing", "e/../a", "d/f/..")
DETOURS = ("", "", "", "", "l/", "d/../", "d/f/../", "./")
FLAGS = (
    os.O_WRONLY,
    os.O_WRONLY | os.O_CREAT,
    os.O_WRONLY | os.O_CREAT | os.O_TRUNC,
    os.O_WRONLY | os.O_CREAT | os.O_EXCL,
    os.O_RDWR | os.O_APPEND,
    os.O_WRONLY | os.O_TRUNC,
)
OPERATIONS = 12


def check(number: int) -> str:
    """Run the program of a number with and without a virtual GPU; return its policy."""
    kind = random.Random(number).choice(("run", "notebook"))
    before, here = warnings.filters[:], os.getcwd()
    # Files under names of `tempfile` are changed in place by `memexplore run`.
    with tempfile.TemporaryDirectory(prefix="files-") as folder:
        try:
            warnings.simplefilter("ignore")
            expected = _run(Path(folder, "real"), number)
            found, lost = _run_virtual(Path(folder, "virtual"), number, kind)
        finally:
            warnings.filters[:] = before
            os.chdir(here)
    for count, (one, other) in enumerate(zip(expected, found, strict=True), 1):
        assert one == other, f"{kind}: {[line for line in expected[:count] if isinstance(line, tuple)]}: {one}, {other}"
    assert not lost, f"{kind}: {lost} lost by {[line for line in expected if isinstance(line, tuple)]}"
    return kind


def _run_virtual(root: Path, number: int, kind: str) -> tuple[list[Any], list[str]]:
    """Return what a program sees on a virtual GPU, and the files of the user that are lost."""
    before: dict[str, bytes] = {}

    def note() -> None:
        before.update(_contents(root))

    with session.every_file() if kind == "run" else contextlib.nullcontext():
        seen = _run(root, number, lambda: mx.virtual("T4"), note)
    after = _contents(root)
    kept = session._overlay.root
    contents = {*after.values(), *(_contents(Path(kept)).values() if kept else ())}
    shutil.rmtree(kept or root, ignore_errors=True)
    # In a notebook a folder may be renamed, with the files in it.
    changed = [name for name, content in before.items() if after.get(name) != content]
    return seen, changed if kind == "run" else [name for name in changed if before[name] not in contents]


def _contents(root: Path) -> dict[str, bytes]:
    return {str(path.relative_to(root)): path.read_bytes() for path in root.rglob("*") if path.is_file()}


def _run(
    root: Path,
    number: int,
    block: Callable[[], contextlib.AbstractContextManager[Any]] = contextlib.nullcontext,
    begins: Callable[[], None] = lambda: None,
) -> list[Any]:
    """Make the user's files, run the program in a block, and return each result, followed by all files it sees."""
    rng = random.Random(number)
    root.mkdir()
    os.chdir(root)
    for name in FOLDERS:
        if name == "d" or rng.random() < 0.8:
            os.makedirs(name, exist_ok=True)
    for name in FILES:
        if rng.random() < 0.7 and os.path.isdir(os.path.dirname(name) or "."):
            _write(name, "wb", pickle.dumps(name))
    if rng.random() < 0.5:
        os.symlink(rng.choice(LINKS), "l")
    begins()
    seen: list[Any] = []
    with block():
        for _ in range(OPERATIONS):
            name, work = _operation(rng)
            try:
                seen.append((name, work()))
            except (OSError, shutil.Error):
                # Which error of the system comes first is not promised.
                seen.append((name, "error"))
            seen.append(_view("."))
    return seen


def _operation(rng: random.Random) -> tuple[str, Callable[[], Any]]:
    path, other = rng.choice(DETOURS) + rng.choice(NAMES), rng.choice(NAMES)
    content, flags = pickle.dumps(rng.random()), rng.choice(FLAGS)
    works: dict[str, Callable[[], Any]] = {
        **{f"open {mode}": functools.partial(_write, path, mode, content) for mode in ("wb", "ab", "xb", "r+b")},
        f"os.open {flags:o}": lambda: _os_write(path, flags, content),
        "truncate": lambda: os.truncate(path, 3),
        "read": lambda: Path(path).read_bytes(),
        "remove": lambda: os.remove(path),
        "rmdir": lambda: os.rmdir(path),
        "rmtree": lambda: shutil.rmtree(path),
        "mkdir": lambda: os.mkdir(path),
        "makedirs": lambda: os.makedirs(path, exist_ok=True),
        "symlink": lambda: os.symlink(other, path),
        "rename": lambda: os.rename(path, other),
        "replace": lambda: os.replace(path, other),
        "move": lambda: bool(shutil.move(path, other)),
        "copy": lambda: bool(shutil.copy(path, other)),
        "copytree": lambda: None if _is_below(other, path) else bool(shutil.copytree(path, other)),
        "realpath": lambda: os.path.relpath(os.path.realpath(path)),
        "state": lambda: (os.path.exists(path), os.path.isdir(path), os.path.islink(path), os.access(path, os.R_OK)),
    }
    name = rng.choice(list(works))
    return f"{name} {path} {other}", works[name]


def _write(path: str, mode: str, content: bytes) -> None:
    with open(path, mode) as file:
        file.write(content)


def _os_write(path: str, flags: int, content: bytes) -> None:
    file = os.open(path, flags, 0o644)
    try:
        os.write(file, content)
    finally:
        os.close(file)


def _is_below(path: str, folder: str) -> bool:
    return os.path.realpath(path).startswith(os.path.realpath(folder))


def _view(folder: str) -> dict[str, Any]:
    """Return the files below a folder as the program sees them."""
    found: dict[str, Any] = {}
    entries = sorted(os.scandir(folder), key=lambda entry: entry.name)
    assert sorted(os.listdir(folder)) == [entry.name for entry in entries]
    for entry in entries:
        path = os.path.join(folder, entry.name)
        if entry.is_symlink():
            found[path] = (os.readlink(path), os.path.exists(path))
        elif entry.is_dir():
            found |= {path: None} | _view(path)
        else:
            content = Path(path).read_bytes()
            assert entry.stat().st_size == os.path.getsize(path) == len(content)
            found[path] = content
    return found
