"""A script run as `python SCRIPT ARGUMENTS` runs it, and its exceptions shown as the interpreter shows them."""

from __future__ import annotations

import os
import pathlib
import sys
import traceback
import types

_PACKAGE = os.path.dirname(os.path.abspath(__file__))


def execute(path: pathlib.Path, arguments: list[str]) -> int:
    """Run a file as `python FILE ARGUMENTS` would, and return the exit status that it asks for."""
    # python makes the file's name absolute (tracebacks show it) and puts the real folder first on sys.path.
    filename = os.path.abspath(path)
    module = types.ModuleType("__main__")
    module.__dict__.update(__file__=filename, __cached__=None, __builtins__=__builtins__)
    before = sys.argv, sys.path, sys.modules["__main__"]
    sys.argv = [str(path), *arguments]
    sys.path = [os.path.dirname(os.path.realpath(path)), *sys.path[1:]]
    sys.modules["__main__"] = module
    try:
        exec(compile(path.read_bytes(), filename, "exec", dont_inherit=True), module.__dict__)
    except SystemExit as ended:
        if ended.code is None or isinstance(ended.code, int):
            return ended.code or 0
        print(ended.code, file=sys.stderr)
        return 1
    finally:
        sys.argv, sys.path, sys.modules["__main__"] = before
    return 0


def print_traceback(error: BaseException) -> None:
    """Print an exception and what led to it as the interpreter would, without the frames of this package."""
    told = traceback.TracebackException.from_exception(error)
    seen: set[int] = set()
    waiting: list[traceback.TracebackException | None] = [told]
    while waiting:
        link = waiting.pop()
        if link is None or id(link) in seen:
            continue
        seen.add(id(link))
        link.stack[:] = [frame for frame in link.stack if not frame.filename.startswith(_PACKAGE + os.sep)]
        waiting += [link.__cause__, link.__context__, *(getattr(link, "exceptions", None) or ())]
    print("".join(told.format()), end="", file=sys.stderr)
