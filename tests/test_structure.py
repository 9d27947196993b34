"""The layout of memexplore: imports go one way and not in cycles, private names of torch stand in one package, and
importing memexplore costs nothing.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

import memexplore
from tests import private_names
from tests.layout import IPYTHON, LEVEL, PLOTLY, ROOT, TORCH, area, cycles, graph, imports, modules

_files = pytest.mark.parametrize("path", modules(), ids=lambda path: str(path.relative_to(ROOT)))


@_files
def test_imports_go_one_way(path):
    own = area(path)
    for name, _ in imports(path):
        package, _, inside = name.partition(".")
        other = inside.partition(".")[0]
        if package == "memexplore" and other in LEVEL:
            assert LEVEL[other] <= LEVEL[own], f"{own} imports {name}, which is on a higher level"


@_files
def test_heavy_packages_are_imported_where_they_belong(path):
    allowed = {"torch": TORCH, "plotly": PLOTLY, "IPython": IPYTHON, "anywidget": IPYTHON, "ipywidgets": IPYTHON}
    for name, at_top in imports(path):
        package = name.split(".")[0]
        if at_top and package in allowed:
            assert area(path) in allowed[package], f"{area(path)} imports {package} when it is imported"


def test_every_module_has_a_level():
    assert {area(path) for path in modules()} - LEVEL.keys() == set()


def test_no_modules_import_each_other_not_even_inside_functions():
    assert cycles(graph(modules(), ROOT)) == []


@pytest.mark.parametrize(
    ("sources", "cycle"),
    [
        (
            {"a": "from pack import b", "b": "from pack.c import x", "c": "import pack.a"},
            {"pack.a", "pack.b", "pack.c"},
        ),
        ({"a": "def f():\n    from pack.b import x", "b": "import pack.a", "c": ""}, {"pack.a", "pack.b"}),
        (
            {"a": "import pack.b", "b": "from pack import x", "__init__": "from pack.a import x"},
            {"pack", "pack.a", "pack.b"},
        ),
    ],
    ids=["three modules", "inside a function", "through a package"],
)
def test_a_circle_is_found(sources, cycle, tmp_path):
    assert cycles(_graph_of(sources, tmp_path)) == [cycle]


@pytest.mark.parametrize(
    "sources",
    [
        {"a": "import pack.b, pack.c", "b": "import pack.c", "c": ""},
        {"a": "import pack.b", "b": "if TYPE_CHECKING:\n    import pack.a"},
    ],
    ids=["one way", "for type checkers only"],
)
def test_imports_without_a_circle_pass(sources, tmp_path):
    assert cycles(_graph_of(sources, tmp_path)) == []


def _graph_of(sources: dict[str, str], folder: Path) -> dict[str, set[str]]:
    root = folder / "pack"
    root.mkdir()
    for name, text in sources.items():
        (root / f"{name}.py").write_text(text)
    return graph(list(root.glob("*.py")), root)


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
_USES_TORCH = [path for path in modules() if area(path) in TORCH - {"torch_internals"}]

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
    codegen = [path for path in modules() if area(path) == "codegen"]
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


LONGEST = 400


def test_files_stay_readable():
    files = [*ROOT.rglob("*.py"), *(ROOT.parent / "tests").rglob("*.py")]
    lines = {str(path.relative_to(ROOT.parent)): len(path.read_text().splitlines()) for path in files}
    assert {name: count for name, count in lines.items() if count > LONGEST} == {}
