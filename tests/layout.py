"""The packages of memexplore: their levels, their permitted imports, and the imports inside the project as a graph."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import memexplore

ROOT = Path(memexplore.__file__).parent

# From the lowest level up; a module may import only from its own level or below.
LEVELS = [
    {
        "units",
        "texts",
        "tensor_text",
        "ipython_shell",
        "extras",
        "frame_variables",
        "dropped_prints",
        "result_files",
        "thrift",
        "parquet_file",
        "tape_words",
        "outside_allocator",
        "cloud_gpus",
        "gpu_links",
        "torch_internals",
    },
    {"tape", "gpu_catalogue"},
    {"rented_gpus", "process_limit"},
    {"allocator"},
    {"tape_file"},
    {"analysis"},
    {"snapshot", "virtual_gpu", "figures"},
    {"runs"},
    {"recorder"},
    {"capture"},
    {"targets"},
    {"knobs"},
    {"steps"},
    {"codegen"},
    {"search"},
    {"live"},
    {"postmortem"},
    {"integrations"},
    {"report"},
    {"notebook", "cli", "script", "doctor"},
    {"__main__"},
]
LEVEL = {name: number for number, names in enumerate(LEVELS) for name in names}
TORCH = {
    "torch_internals",
    "recorder",
    "virtual_gpu",
    "capture",
    "targets",
    "knobs",
    "steps",
    "codegen",
    "search",
    "live",
    "postmortem",
    "integrations",
}
"""Packages and modules that import torch."""
TESTED_UNDER_EVERY_TORCH = (TORCH - {"search", "codegen"}) | {"fidelity"}
"""Folders and files of tests that `pytest -m torch` selects, and the doctests of the packages of the same name.

What searches and writes code uses torch only through the packages below it."""
TESTED_UNDER_ONE_TORCH = {
    "fidelity/test_many_gpus.py",
    "fidelity/test_others.py",
    "fidelity/test_recorded_training.py",
    "integrations/test_deepspeed.py",
    "integrations/test_ended_fits.py",
    "integrations/test_interrupts.py",
    "integrations/test_knobs_in_fits.py",
    "knobs/test_interrupts.py",
    "live/test_gradient_buckets.py",
    "live/test_knobs_undone.py",
    "live/test_leaks.py",
    "live/test_long_runs.py",
    "live/test_predicted_loss.py",
    "live/test_prediction.py",
    "live/test_watch_ended.py",
    "virtual_gpu/test_interrupts.py",
}
"""Files among them that `pytest -m torch` leaves out: they take half of the time, with processes of their own, an
interrupt at every line or large models, and use what other files test under every release."""
PLOTLY = {"figures", "report", "notebook"}
IPYTHON = {"notebook"}


class Import(NamedTuple):
    """One import statement that runs, not one for type checkers only."""

    name: str
    at_top: bool


def depends_on_torch(path: Path) -> bool:
    """Return whether the tests of a file, relative to the root of the project, run under every release of torch."""
    folder = path.parts[1].removeprefix("test_").removesuffix(".py")
    return folder in TESTED_UNDER_EVERY_TORCH and "/".join(path.parts[1:]) not in TESTED_UNDER_ONE_TORCH


def area(path: Path) -> str:
    """The package or module directly under memexplore/ that a file belongs to."""
    return path.relative_to(ROOT).parts[0].removesuffix(".py")


def modules() -> list[Path]:
    """All source files but that of the public names."""
    return sorted(path for path in ROOT.rglob("*.py") if path != ROOT / "__init__.py")


def imports(path: Path) -> list[Import]:
    """Imports of a file, those inside functions included; `from package import name` names `package.name`."""
    found: list[Import] = []

    def visit(node: ast.AST, top: bool) -> None:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.If) and "TYPE_CHECKING" in ast.dump(child.test):
                for other in child.orelse:
                    visit(ast.Module([other], []), top)
                continue
            if isinstance(child, ast.Import):
                found.extend(Import(alias.name, top) for alias in child.names)
            elif isinstance(child, ast.ImportFrom) and child.module:
                found.extend(Import(f"{child.module}.{alias.name}", top) for alias in child.names)
            function = isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
            visit(child, top and not function)

    visit(ast.parse(path.read_text()), True)
    return found


def graph(files: list[Path], root: Path) -> dict[str, set[str]]:
    """Module -> modules of the project that it imports. A package stands for its `__init__.py`."""
    names = {_name(path, root): path for path in files}
    return {name: set(_targets(path, names)) - {name} for name, path in names.items()}


def _name(path: Path, root: Path) -> str:
    return ".".join(path.relative_to(root.parent).with_suffix("").parts).removesuffix(".__init__")


def _targets(path: Path, names: dict[str, Path]) -> Iterator[str]:
    for name, _ in imports(path):
        parent = name.rpartition(".")[0]
        yield from [found for found in (name, parent) if found in names][:1]


def cycles(edges: dict[str, set[str]]) -> list[set[str]]:
    """Sets of modules that import each other, directly or through others of the set (Tarjan's algorithm)."""
    number: dict[str, int] = {}
    lowest: dict[str, int] = {}
    stack: list[str] = []
    found: list[set[str]] = []

    def visit(module: str) -> None:
        number[module] = lowest[module] = len(number)
        stack.append(module)
        for other in edges[module]:
            if other not in number:
                visit(other)
            if other in stack:
                lowest[module] = min(lowest[module], lowest[other])
        if lowest[module] == number[module]:
            cycle = {module}
            while (member := stack.pop()) != module:
                cycle.add(member)
            if len(cycle) > 1:
                found.append(cycle)

    for module in edges:
        if module not in number:
            visit(module)
    return found
