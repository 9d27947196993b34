"""Uses of private names of torch in a source file, found in its syntax tree: lines and names come out."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable, Iterator
from pathlib import Path

from memexplore.torch_internals import check
from tests.layout import syntax_tree

NOT_TORCH = {
    "_replace",
    "_fields",
    "_asdict",
    "_getframe",
    "_current_frames",
    "_processes",
    "_run_exitfuncs",
    "_thread",
}
"""Names of namedtuples, of `sys`, of `concurrent.futures` and of `atexit`, and a documented module."""
OPERATORS = ("_aten.", "aten.", "torch.ops.")


def _private(name: str) -> bool:
    return name.startswith("_") and not (name.startswith("__") and name.endswith("__"))


LEAVES = {leaf for row in check.internals() if _private(leaf := row.name.rpartition(".")[2])}
"""The last part of each private name. `__call__`, which a row has once its module is imported, is not private."""


def _dotted(node: ast.AST) -> str:
    """`torch.nn.functional` for the expression of that text; the last attribute alone after any other expression."""
    if isinstance(node, ast.Attribute):
        return f"{_dotted(node.value)}.{node.attr}"
    return node.id if isinstance(node, ast.Name) else ""


def _set_on_self(tree: ast.AST) -> set[str]:
    """Attributes that the methods of a file set on `self`, and its functions and fields."""
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            found.add(node.name)
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and _on_self(node):
            found.add(node.attr)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            found.add(node.id)
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "__setattr__":
            found |= {value.value for value in node.args if isinstance(value, ast.Constant)}
    return found


def _on_self(node: ast.Attribute) -> bool:
    return isinstance(node.value, ast.Name) and node.value.id in ("self", "cls")


def _names(node: ast.AST, own: set[str], on_self: set[str]) -> Iterator[str]:
    if isinstance(node, ast.Import):
        names = [alias.name for alias in node.names if alias.name not in NOT_TORCH]
        yield from (name for name in names if any(map(_private, name.split("."))))
    elif isinstance(node, ast.ImportFrom) and node.module and node.module.split(".")[0] == "torch":
        names = [f"{node.module}.{alias.name}" for alias in node.names]
        yield from (name for name in names if any(map(_private, name.split("."))))
    elif isinstance(node, ast.Attribute) and _private(node.attr) and node.attr not in NOT_TORCH:
        name = _dotted(node)
        ours = node.attr in (on_self if _on_self(node) else own) and not name.startswith(("torch.", "nn."))
        if not (ours or name.startswith(OPERATORS)):
            yield name
    elif isinstance(node, ast.Constant) and isinstance(node.value, str) and node.value in LEAVES:
        yield node.value


def in_texts(paths: Iterable[Path]) -> set[str]:
    """Private names of torch in the strings of files, which hold code for users to copy."""
    constants = (
        node.value
        for path in paths
        for node in ast.walk(syntax_tree(path))
        if isinstance(node, ast.Constant) and isinstance(node.value, str)
    )
    names = {name for text in constants for name in re.findall(r"\btorch(?:\.\w+)*\._\w+|\._\w+", text)}
    return {name.rpartition(".")[2] for name in names if not name.startswith("torch.ops.")}


def in_files(paths: Iterable[Path]) -> list[str]:
    """`file:line: name` of every use of a private name of torch."""
    trees = {path: syntax_tree(path) for path in paths}
    on_self = {path: _set_on_self(tree) for path, tree in trees.items()}
    own = set().union(*on_self.values()) - LEAVES
    return [
        f"{path.name}:{node.lineno}: {name}"
        for path, tree in trees.items()
        for node in ast.walk(tree)
        for name in _names(node, own, on_self[path])
    ]
