"""Write files of results: a path that cannot be written is refused before a run, and a result is never lost.

A tape, a page or a snapshot is written by a function that gets its path.
"""

from __future__ import annotations

import importlib.util
import os
import pathlib
import tempfile
from collections.abc import Callable
from typing import NamedTuple


class Kind(NamedTuple):
    """A kind of result, and how its files begin."""

    name: str
    starts: tuple[bytes, ...]


TAPE = Kind("a tape", (b"memexplore tape ",))
PARQUET = Kind("a Parquet file", (b"PAR1",))
PAGE = Kind("an HTML page", (b"<!doctype html", b"<html"))
MEASUREMENT = Kind("a shared measurement", (b'{\n  "memexplore measurement"',))


_SEPARATORS = tuple(filter(None, (os.sep, os.altsep)))


def tape_kind(path: str | os.PathLike[str]) -> Kind:
    """Return the kind of file to which a tape is written, which follows from the ending of its name.

    >>> tape_kind("step.tape").name, tape_kind("step.parquet").name
    ('a tape', 'a Parquet file')
    """
    return PARQUET if os.fspath(path).endswith(".parquet") else TAPE


def require_pyarrow() -> None:
    """Raise ImportError with one sentence where pyarrow, which Parquet files need, is not installed."""
    if importlib.util.find_spec("pyarrow") is None:
        raise ImportError("Parquet files need pyarrow, which is not installed: pip install pyarrow")


def check(path: str | os.PathLike[str], kind: Kind) -> None:
    """Check that a result can be written to a path, which is left as it is.

    An existing file may be replaced by a result of the same kind only, so that no script or notebook is lost.

    >>> check("no such folder/page.html", PAGE)
    Traceback (most recent call last):
    ...
    ValueError: the folder 'no such folder' does not exist; create it first

    Raises ValueError with one sentence.
    """
    if kind is PARQUET:
        try:
            require_pyarrow()
        except ImportError as error:
            raise ValueError(str(error)) from None
    # A pathlib.Path does not keep the slash.
    is_folder = os.fspath(path).endswith(_SEPARATORS)
    path = pathlib.Path(path)
    folder = path.parent
    if is_folder or not path.name or os.path.isdir(path):
        raise ValueError(f"{str(path)!r} is a folder; add the name of a file")
    if not os.path.isdir(folder):
        is_file = os.path.exists(folder)
        problem = "is a file, not a folder; write another path" if is_file else "does not exist; create it first"
        raise ValueError(f"the folder {str(folder)!r} {problem}")
    if not os.path.exists(path):
        try:
            # The only reliable test: permissions, file systems that are read-only, names that are too long.
            with tempfile.TemporaryFile(dir=folder):
                pass
            path.touch(exist_ok=False)
            path.unlink()
        except (OSError, ValueError) as error:
            reason = getattr(error, "strerror", None) or error
            raise ValueError(f"{str(path)!r} cannot be written ({reason}); write another path") from None
        return
    if not os.path.isfile(path):
        # A device or pipe, such as /dev/stdout.
        return
    if not os.access(path, os.W_OK):
        raise ValueError(f"{str(path)!r} cannot be written (Permission denied); write another path")
    try:
        with path.open("rb") as file:
            start = file.read(64).lstrip().lower()
    except OSError as error:
        raise ValueError(f"{str(path)!r} cannot be read ({error.strerror}); write another path") from None
    if start and not start.startswith(tuple(text.lower() for text in kind.starts)):
        raise ValueError(f"{str(path)!r} exists and is not {kind.name}, so it is not replaced; write another path")


def write(path: pathlib.Path, writer: Callable[[pathlib.Path], object]) -> tuple[pathlib.Path, str]:
    """Write a result, to a new folder of temporary files if its own path fails.

    Returns the path that was written, and a sentence for the user if it is another one, else an empty text. Raises
    OSError if there is no place for the result at all.
    """
    try:
        _write_beside(path, writer)
    except OSError as error:
        reason = error.strerror or str(error)
        fallback = pathlib.Path(tempfile.mkdtemp(prefix="memexplore-result-"), path.name)
        writer(fallback)
        return fallback, f"{path} could not be written ({reason}); the result is in {fallback}"
    return path, ""


def _write_beside(path: pathlib.Path, writer: Callable[[pathlib.Path], object]) -> None:
    """Write a file beside a path and give it the path's name when it is whole: a full disk leaves what stood there."""
    target = pathlib.Path(os.path.realpath(path))
    if os.path.exists(target) and not target.is_file():
        writer(path)  # a device or pipe
        return
    # The ending stays: it decides what is written.
    beside = target.with_name(f".{os.getpid()}-{target.name}")
    try:
        writer(beside)
        os.replace(beside, target)
    except BaseException as error:
        beside.unlink(missing_ok=True)
        if isinstance(error, PermissionError):  # the file may be written, and its folder not
            writer(path)
            return
        raise


__all__ = ["PAGE", "PARQUET", "TAPE", "Kind", "check", "require_pyarrow", "tape_kind", "write"]
