"""Run a program like `python SCRIPT ARGUMENTS` or `python -m MODULE ARGUMENTS`, and print its exceptions likewise."""

from __future__ import annotations

import ast
import contextlib
import importlib.util
import os
import pathlib
import sys
import traceback
import types
from collections.abc import Callable, Iterator
from importlib.abc import InspectLoader
from importlib.machinery import ModuleSpec

_PERCENT, _CONVERTED = "__memexplore_percent__", "__memexplore_converted__"
"""Names of `percent` and `converted` in the module of a script."""
_PACKAGE = os.path.dirname(os.path.abspath(__file__))


class NoModuleError(Exception):
    """A module that `python -m` cannot run; the message is Python's."""


def script(path: pathlib.Path, arguments: list[str]) -> Callable[[], None]:
    """Return a function that runs a file like `python FILE ARGUMENTS`; `sys.exit` in it raises SystemExit.

    Raises SyntaxError for a file that is not Python, OSError for one that cannot be read.
    """
    # Python makes the file name absolute (tracebacks show it) and puts its real folder first on sys.path.
    filename = os.path.abspath(path)
    source = path.read_bytes()
    code, is_marked = _marked(source, filename)

    def run() -> None:
        with _as_main(str(path), os.path.dirname(os.path.realpath(path)), arguments) as main:
            main.__dict__.update(__file__=filename, __cached__=None)
            if is_marked:
                _provide(main)
            exec(code, main.__dict__)

    return run


def _marked(source: str | bytes, filename: str) -> tuple[types.CodeType, bool]:
    """Return the code of a source whose formats and conversions show unknown values as `virtual`, and if it has any."""
    tree = compile(source, filename, "exec", ast.PyCF_ONLY_AST, dont_inherit=True)
    marking = _Marking()
    tree = marking.visit(tree)
    # Other source is compiled as python compiles it.
    return compile(tree if marking.number else source, filename, "exec", dont_inherit=True), bool(marking.number)


def _provide(main: types.ModuleType) -> None:
    from memexplore.virtual_gpu.tensors.percent_format import converted, percent

    main.__dict__.update({_PERCENT: percent, _CONVERTED: converted})


class _Marking(ast.NodeTransformer):
    """Replaces ``"text" % values``, ``float(x)`` and ``int(x)``, whose results do not tell that a value is unknown.

    They become calls of `percent` and `converted`, which mark values that a virtual GPU does not compute.
    """

    number = 0
    """Replacements so far."""

    def visit_BinOp(self, node: ast.BinOp) -> ast.expr:
        self.generic_visit(node)
        if not (isinstance(node.op, ast.Mod) and _is_text(node.left)):
            return node
        return self._call(_PERCENT, [node.left, node.right], node)

    def visit_Call(self, node: ast.Call) -> ast.expr:
        self.generic_visit(node)
        is_conversion = isinstance(node.func, ast.Name) and node.func.id in ("float", "int")
        if not is_conversion or len(node.args) != 1 or node.keywords or isinstance(node.args[0], ast.Starred):
            return node
        return self._call(_CONVERTED, [node.func, node.args[0]], node)

    def _call(self, name: str, arguments: list[ast.expr], node: ast.expr) -> ast.expr:
        self.number += 1
        call = ast.Call(ast.Name(name, ast.Load()), arguments, [])
        return ast.fix_missing_locations(ast.copy_location(call, node))


def _is_text(node: ast.expr) -> bool:
    """Return whether an expression is a string as far as its source shows, such as ``"%10s" * 2 + "%10.4g"``."""
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add | ast.Mult):
        return _is_text(node.left) or _is_text(node.right)
    return isinstance(node, ast.JoinedStr) or (isinstance(node, ast.Constant) and isinstance(node.value, str))


def module(name: str, arguments: list[str]) -> Callable[[], None]:
    """Return a function that runs a module like `python -m NAME ARGUMENTS`; `sys.exit` in it raises SystemExit.

    The function raises `NoModuleError` for a module that does not exist or cannot be run.
    """

    def run() -> None:
        with _as_main("-m", os.getcwd(), arguments) as main:
            spec, code = _found(name)
            source = spec.loader.get_source(spec.name) if isinstance(spec.loader, InspectLoader) else None
            if source is not None:
                code, is_marked = _marked(source, spec.origin or "<string>")
                if is_marked:
                    _provide(main)
            main.__dict__.update(
                __spec__=spec,
                __file__=spec.origin,
                __cached__=spec.cached,
                __loader__=spec.loader,
                __package__=spec.parent,
            )
            if spec.origin is not None:
                sys.argv[0] = spec.origin
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


def _found(name: str) -> tuple[ModuleSpec, types.CodeType]:
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
            return _found(f"{name}.__main__")
        except NoModuleError as error:
            raise NoModuleError(f"{error}; {name!r} is a package and cannot be directly executed") from None
    get_code = getattr(spec.loader, "get_code", None)
    code = get_code(name) if get_code is not None else None
    if code is None:
        raise NoModuleError(f"No code object available for {name}")
    return spec, code


def exit_status(error: SystemExit) -> int:
    """Return the exit status of `sys.exit`, after printing its message as the interpreter does."""
    if error.code is None or isinstance(error.code, int):
        return error.code or 0
    print(error.code, file=sys.stderr)
    return 1


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
