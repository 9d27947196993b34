"""Run a program like `python SCRIPT ARGUMENTS` or `python -m MODULE ARGUMENTS`."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import pathlib
import sys
import types
from collections.abc import Callable, Iterator
from importlib.machinery import ModuleSpec

from memexplore.run.programs.ending import ending_as_process


class NoModuleError(Exception):
    """A module that `python -m` cannot run; the message is Python's."""


def script(path: pathlib.Path, arguments: list[str]) -> Callable[[], None]:
    """Return a function that runs a file like `python FILE ARGUMENTS`; `sys.exit` in it raises SystemExit.

    Raises SyntaxError for a file that is not Python, OSError for a file that cannot be read.
    """
    # Python makes the file name absolute (tracebacks show it) and puts its real folder first on sys.path.
    filename = os.path.abspath(path)
    code = compile(path.read_bytes(), filename, "exec", dont_inherit=True)

    def run() -> None:
        with _as_main(str(path), os.path.dirname(os.path.realpath(path)), arguments) as main:
            main.__dict__.update(__file__=filename, __cached__=None)
            with ending_as_process():
                exec(code, main.__dict__)

    return run


def module(name: str, arguments: list[str]) -> Callable[[], None]:
    """Return a function that runs a module like `python -m NAME ARGUMENTS`; `sys.exit` in it raises SystemExit.

    The function raises `NoModuleError` for a module that does not exist or cannot be run.
    """

    def run() -> None:
        with _as_main("-m", os.getcwd(), arguments) as main:
            spec, code = _spec_and_code(name)
            main.__dict__.update(
                __spec__=spec,
                __file__=spec.origin,
                __cached__=spec.cached,
                __loader__=spec.loader,
                __package__=spec.parent,
            )
            if spec.origin is not None:
                sys.argv[0] = spec.origin
            with ending_as_process():
                exec(code, main.__dict__)

    return run


@contextlib.contextmanager
def _as_main(argument: str, folder: str, arguments: list[str]) -> Iterator[types.ModuleType]:
    """Yield a new module that is `__main__` in the block, with `sys.argv` and the first folder of `sys.path`."""
    main = types.ModuleType("__main__")
    main.__dict__["__builtins__"] = __builtins__
    before = sys.argv, sys.path, sys.modules["__main__"]
    sys.argv = [argument, *arguments]
    sys.path = [folder, *sys.path[1:]]
    sys.modules["__main__"] = main
    try:
        yield main
    finally:
        sys.argv, sys.path, sys.modules["__main__"] = before


def _spec_and_code(name: str) -> tuple[ModuleSpec, types.CodeType]:
    """Return specification and code of a module, of `NAME.__main__` for a package; imports its parent packages.

    Raises NoModuleError with the messages of CPython's runpy.py.
    """
    if name.startswith("."):
        raise NoModuleError("Relative module names not supported")
    package = name.rpartition(".")[0]
    if package:
        try:
            importlib.import_module(package)
        except ImportError as error:
            # An error inside of the package is the program's own.
            if error.name is None or (error.name != package and not package.startswith(error.name + ".")):
                raise
    try:
        spec = importlib.util.find_spec(name)
    except (ImportError, AttributeError, TypeError, ValueError) as error:
        text = f"Error while finding module specification for {name!r} ({type(error).__name__}: {error})"
        if name.endswith(".py"):
            text += f". Try using '{name[:-3]}' instead of '{name}' as the module name."
        raise NoModuleError(text) from error
    if spec is None:
        raise NoModuleError(f"No module named {name}")
    if spec.submodule_search_locations is not None:
        if name.rpartition(".")[2] == "__main__":
            raise NoModuleError("Cannot use package as __main__ module")
        try:
            importlib.import_module(name)
            return _spec_and_code(f"{name}.__main__")
        except NoModuleError as error:
            raise NoModuleError(f"{error}; {name!r} is a package and cannot be directly executed") from None
    get_code = getattr(spec.loader, "get_code", None)
    code = get_code(name) if get_code is not None else None
    if code is None:
        raise NoModuleError(f"No code object available for {name}")
    return spec, code
