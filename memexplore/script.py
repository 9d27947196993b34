"""Run a script like `python SCRIPT ARGUMENTS`, and print its exceptions like the interpreter."""

from __future__ import annotations

import os
import pathlib
import sys
import traceback
import types

_PACKAGE = os.path.dirname(os.path.abspath(__file__))


def execute(path: pathlib.Path, arguments: list[str]) -> int:
    """Run a file like `python FILE ARGUMENTS` and return its exit status."""
    # Python makes the file name absolute (tracebacks show it) and puts its real folder first on sys.path.
    filename = os.path.abspath(path)
    module = types.ModuleType("__main__")
    module.__dict__.update(__file__=filename, __cached__=None, __builtins__=__builtins__)
    before = sys.argv, sys.path, sys.modules["__main__"]
    sys.argv = [str(path), *arguments]
    sys.path = [os.path.dirname(os.path.realpath(path)), *sys.path[1:]]
    sys.modules["__main__"] = module
    try:
        exec(compile(path.read_bytes(), filename, "exec", dont_inherit=True), module.__dict__)
    except SystemExit as error:
        if error.code is None or isinstance(error.code, int):
            return error.code or 0
        print(error.code, file=sys.stderr)
        return 1
    finally:
        sys.argv, sys.path, sys.modules["__main__"] = before
    return 0


def print_traceback(error: BaseException) -> None:
    """Print an exception with its causes like the interpreter, without the frames of this package."""
    root = traceback.TracebackException.from_exception(error)
    seen: set[int] = set()
    waiting: list[traceback.TracebackException | None] = [root]
    while waiting:
        link = waiting.pop()
        if link is None or id(link) in seen:
            continue
        seen.add(id(link))
        link.stack[:] = [frame for frame in link.stack if not frame.filename.startswith(_PACKAGE + os.sep)]
        waiting += [link.__cause__, link.__context__, *(getattr(link, "exceptions", None) or ())]
    print("".join(root.format()), end="", file=sys.stderr)
