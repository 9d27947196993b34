"""The variables of a cell: which it assigns, the cell with other values for them, and which names it needs."""

from __future__ import annotations

import ast
import builtins
from collections.abc import Iterator, Mapping
from types import CodeType, FunctionType
from typing import Any

_SEQUENCES = (ast.Tuple, ast.List)


def assigned(source: str) -> dict[str, Any]:
    """Return the variables that source assigns outside of functions; the value of a literal, else None.

    >>> assigned("batch = 8\\nfor epoch in range(2): rate = 0.1 * epoch")
    {'batch': 8, 'rate': None}
    """
    names: dict[str, Any] = {}
    for name, value in _assignments(ast.parse(source)):
        try:
            names.setdefault(name, ast.literal_eval(value))
        except ValueError:
            names.setdefault(name, None)
    return names


def with_values(source: str, values: dict[str, Any]) -> ast.Module:
    """Return the syntax tree of source with other values in the assignments of some variables.

    >>> ast.unparse(with_values("batch = 8\\nx = batch * [0]", {"batch": 16}))
    'batch = 16\\nx = batch * [0]'

    Raises ValueError for a variable that the source does not assign outside of functions.
    """
    tree = ast.parse(source)
    assignments = list(_assignments(tree))
    for name in values:
        if name not in dict(assignments):
            names = ", ".join(dict.fromkeys(name for name, _ in assignments)) or "none"
            raise ValueError(f"the cell assigns no variable {name!r}; it assigns {names}")
    replaced = {id(expression): values[name] for name, expression in assignments if name in values}

    class Replacing(ast.NodeTransformer):
        def visit(self, node: ast.AST) -> ast.AST:
            if id(node) not in replaced:
                return self.generic_visit(node)
            return ast.copy_location(ast.parse(repr(replaced[id(node)]), mode="eval").body, node)

    Replacing().visit(tree)
    return ast.fix_missing_locations(tree)


def _assignments(tree: ast.AST) -> Iterator[tuple[str, ast.expr]]:
    """Yield name and value of every assignment outside of functions and classes."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef | ast.Lambda):
            continue
        if isinstance(node, ast.Assign):
            for target in node.targets:
                yield from _pairs(target, node.value)
        elif isinstance(node, ast.AnnAssign) and node.value is not None:
            yield from _pairs(node.target, node.value)
        yield from _assignments(node)


def _pairs(target: ast.expr, value: ast.expr) -> Iterator[tuple[str, ast.expr]]:
    if isinstance(target, ast.Name):
        yield target.id, value
        return
    if not isinstance(target, _SEQUENCES) or not isinstance(value, _SEQUENCES):
        return
    if len(target.elts) != len(value.elts) or any(isinstance(element, ast.Starred) for element in target.elts):
        return
    for name, part in zip(target.elts, value.elts, strict=True):
        yield from _pairs(name, part)


def names_in(program: CodeType) -> Iterator[str]:
    """Yield all names of variables and attributes in code, those of inner functions included.

    >>> sorted(set(names_in(compile("f = lambda: x.y", "<cell>", "exec"))))
    ['f', 'x', 'y']
    """
    yield from program.co_names
    for constant in program.co_consts:
        if isinstance(constant, CodeType):
            yield from names_in(constant)


def names_made(source: str) -> list[str]:
    """Return the names that a cell assigns before it reads them: what they were is not needed.

    >>> names_made("x = y; y = 1"), names_made("total += 1"), names_made("[i for i in range(3)]; i = 0")
    (['x'], [], ['i'])
    """
    is_read: dict[str, bool] = {}
    for name, reads in _uses(ast.parse(source)):
        is_read.setdefault(name, reads)
    return [name for name, reads in is_read.items() if not reads]


def _uses(node: ast.AST) -> Iterator[tuple[str, bool]]:
    """Yield each name outside of functions and whether it is read, in the order of evaluation."""
    match node:
        case ast.Name():
            yield node.id, not isinstance(node.ctx, ast.Store)
        case ast.Import() | ast.ImportFrom():
            yield from ((alias.asname or alias.name.partition(".")[0], False) for alias in node.names)
        case ast.FunctionDef() | ast.AsyncFunctionDef() | ast.ClassDef():
            for part in (*node.decorator_list, *getattr(node, "bases", ())):
                yield from _uses(part)
            yield node.name, False
        case ast.Lambda():
            yield from _uses(node.args)
        case ast.ListComp() | ast.SetComp() | ast.DictComp() | ast.GeneratorExp():
            uses = [use for child in ast.iter_child_nodes(node) for use in _uses(child)]
            own = {name for name, reads in uses if not reads}
            yield from (use for use in uses if use[0] not in own)
        case ast.AugAssign(target=ast.Name(id=name)):
            yield name, True
            yield from _uses(node.value)
        case _:
            # What is assigned (`value`, of a loop `iter`) is evaluated before its targets.
            parts = list(ast.iter_child_nodes(node))
            first = getattr(node, "iter", getattr(node, "value", None))
            for part in sorted(parts, key=lambda part: part is not first):
                yield from _uses(part)


def names_read(source: str, namespace: Mapping[str, Any]) -> dict[str, Any]:
    """Return the names of a notebook that a cell needs, also through functions of the notebook.

    >>> names_read("x = y", {"x": 1, "y": 2, "z": 3})
    {'y': 2}
    """
    made = names_made(source)
    return {name: value for name, value in names_used(source, namespace).items() if name not in made}


def names_used(source: str, namespace: Mapping[str, Any]) -> dict[str, Any]:
    """Return the names of a notebook that a cell reads or makes, also through functions of the notebook.

    >>> sorted(names_used("x = y", {"x": 1, "y": 2, "z": 3}))
    ['x', 'y']
    """
    used: dict[str, Any] = {}
    waiting = [compile(source, "<cell>", "exec", dont_inherit=True)]
    while waiting:
        for name in names_in(waiting.pop()):
            if name in used or name not in namespace or hasattr(builtins, name):
                continue
            value = used[name] = namespace[name]
            if isinstance(value, FunctionType) and value.__globals__ is namespace:
                waiting.append(value.__code__)
    return used
