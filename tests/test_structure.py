"""The house as the README draws it: imports go one way, and importing memexplore costs nothing."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import memexplore
from tests import private_names

ROOT = Path(memexplore.__file__).parent

# From the ground up; a module may import only from its own level or below.
LEVELS = [
    {"units", "outside_allocator", "torch_internals"},
    {"tape", "gpu_catalogue"},
    {"allocator"},
    {"analysis"},
    {"snapshot", "virtual_gpu", "figures"},
    {"recorder"},
    {"capture"},
    {"targets"},
    {"knobs"},
    {"steps"},
    {"codegen"},
    {"search"},
    {"report"},
    {"notebook", "cli", "script", "doctor"},
]
LEVEL = {name: number for number, names in enumerate(LEVELS) for name in names}
TORCH = {"torch_internals", "recorder", "virtual_gpu", "capture", "targets", "knobs", "steps", "codegen", "search"}
PLOTLY = {"figures", "report", "notebook"}
IPYTHON = {"notebook"}


def _modules() -> list[Path]:
    return sorted(path for path in ROOT.rglob("*.py") if path != ROOT / "__init__.py")


def _place(path: Path) -> str:
    return path.relative_to(ROOT).parts[0].removesuffix(".py")


def _runtime_imports(path: Path) -> list[tuple[str, bool]]:
    """Imported names, and whether at the top level; those for type checkers only are left out."""
    found: list[tuple[str, bool]] = []

    def visit(node: ast.AST, top: bool) -> None:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.If) and "TYPE_CHECKING" in ast.dump(child.test):
                continue
            if isinstance(child, ast.Import):
                found.extend((alias.name, top) for alias in child.names)
            elif isinstance(child, ast.ImportFrom) and child.module:
                if child.module == "memexplore":
                    found.extend((f"memexplore.{alias.name}", top) for alias in child.names)
                else:
                    found.append((child.module, top))
            inside = isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
            visit(child, top and not inside)

    visit(ast.parse(path.read_text()), True)
    return found


@pytest.mark.parametrize("path", _modules(), ids=lambda path: str(path.relative_to(ROOT)))
def test_imports_go_one_way(path):
    place = _place(path)
    for name, _top in _runtime_imports(path):
        if name.startswith("memexplore."):
            other = name.split(".")[1]
            if other in LEVEL:
                assert LEVEL[other] <= LEVEL[place], f"{place} imports {name}, which stands above it"


@pytest.mark.parametrize("path", _modules(), ids=lambda path: str(path.relative_to(ROOT)))
def test_heavy_packages_are_imported_where_they_belong(path):
    place = _place(path)
    for name, top in _runtime_imports(path):
        package = name.split(".")[0]
        allowed = {"torch": TORCH, "plotly": PLOTLY, "IPython": IPYTHON, "anywidget": IPYTHON, "ipywidgets": IPYTHON}
        if top and package in allowed:
            assert place in allowed[package], f"{place} imports {package} at its top"


def test_importing_memexplore_imports_neither_torch_nor_plotly():
    code = "import sys, memexplore; print(sorted({'torch', 'plotly', 'pandas', 'IPython'} & set(sys.modules)))"
    assert (
        subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.strip() == "[]"
    )


@pytest.mark.parametrize("name", memexplore.__all__)
def test_every_public_name_is_there(name):
    assert getattr(memexplore, name) is not None


def test_a_public_name_is_never_hidden_by_a_module_of_the_same_name():
    code = (
        "import memexplore.capture, memexplore.notebook.magics, memexplore.report, memexplore.cli, memexplore as mx;"
        "print([name for name in mx.__all__ if type(getattr(mx, name)).__name__ == 'module'])"
    )
    assert (
        subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.strip() == "[]"
    )


# snapshot/ reads names of torch's functions in the stacks of recordings, which any release may have made.
_USES_TORCH = [path for path in _modules() if _place(path) in TORCH - {"torch_internals"}]

GENERATED = {
    "_pytree": "no public function flattens nested arguments",
    "_version": "a tensor that backward needs may have been overwritten",
    "_schema": "name of the operator that a checkpoint policy is asked about",
    "_cdata": "identity of a storage; `data_ptr` is 0 for tensors without values",
}
"""Private names of torch in the lines that users copy, each with its reason."""


def test_private_names_of_torch_stand_in_torch_internals_only():
    assert private_names.in_files(_USES_TORCH) == []


def test_generated_code_uses_no_other_private_names_of_torch():
    codegen = [path for path in _modules() if _place(path) == "codegen"]
    assert private_names.in_texts(codegen) & private_names.LEAVES <= set(GENERATED)


@pytest.mark.parametrize(
    "line",
    [
        "from torch.utils import _pytree",
        "import torch._subclasses",
        "from torch._C import _current_autograd_node",
        "version = tensor._version",
        "key = storage(tensor)._cdata",
        "flag = getattr(tensor, '_is_param', False)",
        "class A:\n    def f(self):\n        return self._version",
    ],
)
def test_a_private_name_of_torch_is_found(line, tmp_path):
    (tmp_path / "new.py").write_text(line)
    assert len(private_names.in_files([tmp_path / "new.py"])) == 1


@pytest.mark.parametrize(
    "line",
    [
        "op = torch.ops.aten._softmax.default",
        "row = row._replace(name='a')",
        "class A:\n    def f(self):\n        self._mine = 1\n        return self._mine",
        "import memexplore.units as _units",
    ],
)
def test_operators_and_names_of_our_own_are_not_private_names_of_torch(line, tmp_path):
    (tmp_path / "new.py").write_text(line)
    assert private_names.in_files([tmp_path / "new.py"]) == []


def test_files_stay_readable():
    long = {
        str(path.relative_to(ROOT)): count for path in _modules() if (count := len(path.read_text().splitlines())) > 450
    }
    assert not long
