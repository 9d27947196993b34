"""The packages of memexplore, which of them may import which, and the imports inside the project as a graph."""

from __future__ import annotations

import ast
import functools
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import memexplore

ROOT = Path(memexplore.__file__).parent

# From the lowest level up; a module may import only from its own package or from one on a lower level.
LEVELS = [
    "text",
    "hardware",
    "tape",
    "allocator",
    "analysis",
    "snapshot",
    "figures",
    "ranks",
    "torch_internals",
    "virtual_gpu",
    "recorder",
    "run",
    "live",
    "out_of_memory",
    "page",
    "jupyter",
    "integrations",
    "cli",
    "__main__",
    "memexplore",
]
"""The last is the file of the public names, which only users import."""
LEVEL = {name: number for number, name in enumerate(LEVELS)}
METHODS_OF_A_TAPE = ROOT / "tape" / "methods.py"
"""The one file that names packages above its own: what a Tape can show and compute."""
TORCH = {"torch_internals", "recorder", "virtual_gpu", "run", "live", "out_of_memory", "integrations"}
"""Packages that import torch."""
PLOTLY = {"figures", "page", "jupyter"}
IPYTHON = {"jupyter"}


class Import(NamedTuple):
    """A name of a module, or of something in one, that a file imports or mentions."""

    name: str
    at_top: bool
    """Whether the import runs when the file is imported."""


def unit(path: Path) -> str:
    """Return the package or module directly under memexplore/ that a file belongs to; `memexplore` for its own file."""
    return unit_of(_module(path, ROOT))


def unit_of(name: str) -> str:
    """Return the unit of a module by its name.

    >>> unit_of("memexplore.run.knobs"), unit_of("memexplore")
    ('run', 'memexplore')
    """
    return ("memexplore", *name.split("."))[:3][-1]


def modules() -> list[Path]:
    """Return all source files of memexplore."""
    return sorted(ROOT.rglob("*.py"))


@functools.cache
def syntax_tree(path: Path) -> ast.Module:
    """Return the syntax tree of a source file."""
    return ast.parse(path.read_text())


@functools.cache
def imports(path: Path) -> list[Import]:
    """Return the imports of a file that run, those inside functions included; type checkers' own are left out.

    `from package import name` names `package.name`.
    """
    statements: list[Import] = []

    def visit(node: ast.AST, top: bool) -> None:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.If) and "TYPE_CHECKING" in ast.dump(child.test):
                for other in child.orelse:
                    visit(ast.Module([other], []), top)
                continue
            if isinstance(child, ast.Import):
                statements.extend(Import(alias.name, top) for alias in child.names)
            elif isinstance(child, ast.ImportFrom) and child.module:
                statements.extend(Import(f"{child.module}.{alias.name}", top) for alias in child.names)
            function = isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
            visit(child, top and not function)

    visit(syntax_tree(path), True)
    return statements


def graph(files: list[Path], root: Path) -> dict[str, set[str]]:
    """Return, for each module of a project, the modules of the project that it imports or names in a string.

    A package stands for its `__init__.py`. A string names a module where it is the whole dotted name of the module or
    of something in it, such as ``"pack.a.function"``; ``f"pack.a.{name}"`` may name each module of `pack.a`.
    """
    names = {_module(path, root) for path in files}
    return {
        (own := _module(path, root)): {
            target
            for name in (*(name for name, _ in imports(path)), *_names_in_strings(path, root.name, names))
            for target in _resolved(name, names)
        }
        - {own}
        for path in files
    }


def units(edges: dict[str, set[str]]) -> dict[str, set[str]]:
    """Return, for each unit, the other units that its modules import."""
    packages: dict[str, set[str]] = {unit_of(name): set() for name in edges}
    for name, targets in edges.items():
        packages[unit_of(name)] |= {unit_of(target) for target in targets} - {unit_of(name)}
    return packages


def _module(path: Path, root: Path) -> str:
    return ".".join(path.relative_to(root.parent).with_suffix("").parts).removesuffix(".__init__")


def _resolved(name: str, names: set[str]) -> list[str]:
    """Return the module that a name is, or is in: none for names of other projects."""
    return [module for module in (name, name.rpartition(".")[0]) if module in names][:1]


def _names_in_strings(path: Path, project: str, names: set[str]) -> Iterator[str]:
    for node in ast.walk(syntax_tree(path)):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and node.value.startswith(f"{project}."):
            # `"project.word"` is not a name in the project's `__init__.py`.
            yield from _resolved(node.value, names - {project})
        elif isinstance(node, ast.JoinedStr) and node.values and isinstance(node.values[0], ast.Constant):
            start = str(node.values[0].value)
            if start.startswith(f"{project}."):
                yield from (name for name in names if name.startswith(start))


def cycles(edges: dict[str, set[str]]) -> list[set[str]]:
    """Return the sets of modules that import each other, directly or through others of the set (Tarjan's algorithm)."""
    number: dict[str, int] = {}
    lowest: dict[str, int] = {}
    stack: list[str] = []
    circles: list[set[str]] = []

    def visit(module: str) -> None:
        number[module] = lowest[module] = len(number)
        stack.append(module)
        for other in edges[module]:
            if other not in number:
                visit(other)
            if other in stack:
                lowest[module] = min(lowest[module], lowest[other])
        if lowest[module] == number[module]:
            circle = {module}
            while (member := stack.pop()) != module:
                circle.add(member)
            if len(circle) > 1:
                circles.append(circle)

    for module in edges:
        if module not in number:
            visit(module)
    return circles
