"""The layout of memexplore: imports go one way and not in cycles, private names of torch stand in one package, and
importing memexplore costs nothing.
"""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import memexplore
from tests import private_names
from tests.layout import (
    IPYTHON,
    LEVEL,
    METHODS_OF_A_TAPE,
    PLOTLY,
    ROOT,
    TORCH,
    cycles,
    graph,
    imports,
    modules,
    syntax_tree,
    unit,
    unit_of,
    units,
)

_GRAPH = graph([path for path in modules() if path != METHODS_OF_A_TAPE], ROOT)


def test_imports_go_one_way():
    upwards = [
        f"{name} imports {target}"
        for name, targets in _GRAPH.items()
        for target in targets
        if unit_of(target) != unit_of(name) and LEVEL[unit_of(target)] >= LEVEL[unit_of(name)]
    ]
    assert upwards == []


def test_no_modules_import_each_other_not_even_inside_functions():
    assert cycles(_GRAPH) == []


def test_memexplore_has_few_packages_and_no_circle_of_them():
    assert units(_GRAPH).keys() <= LEVEL.keys()
    assert 15 <= len(units(_GRAPH)) <= 20
    assert cycles(units(_GRAPH)) == []


def test_heavy_packages_are_imported_where_they_belong():
    allowed = {"torch": TORCH, "plotly": PLOTLY, "IPython": IPYTHON, "anywidget": IPYTHON, "ipywidgets": IPYTHON}
    misplaced = [
        f"{path.relative_to(ROOT)} imports {name}"
        for path in modules()
        for name, at_top in imports(path)
        if at_top and unit(path) not in allowed.get(name.partition(".")[0], {unit(path)})
    ]
    assert misplaced == []


_PARSERS = {"ast", "dis", "tokenize"}
_SOURCES = {"getsource", "getsourcelines", "getblock"}
"""Functions of `inspect` that return source."""
_MAY_PARSE = ("run/code/", "live/")
"""Where source and bytecode are read; in live/ until the issue on out-of-memory errors."""
_STILL_PARSE = {
    "jupyter/magics.py",
    "jupyter/own_source.py",
}
"""Other files that still read source or bytecode: delete a line when its file stops."""


def test_source_and_bytecode_are_read_in_one_place():
    readers = {path.relative_to(ROOT).as_posix() for path in modules() if _reads_source(path)}
    assert {name for name in readers if not name.startswith(_MAY_PARSE)} == _STILL_PARSE


def _reads_source(path: Path) -> bool:
    names = [name.split(".") for name, _ in imports(path)]
    attributes = (node.attr for node in ast.walk(syntax_tree(path)) if isinstance(node, ast.Attribute))
    return any(name[0] in _PARSERS or name[-1] in _SOURCES for name in names) or not _SOURCES.isdisjoint(attributes)


@pytest.mark.parametrize(
    ("sources", "circle"),
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
        ({"a": "import_module('pack.b')", "b": "import pack.a"}, {"pack.a", "pack.b"}),
        ({"a": "TABLE = {'f': 'pack.b.function'}", "b": "import pack.a"}, {"pack.a", "pack.b"}),
        ({"a": "from pack import x", "__init__": "import_module(f'pack.{HOMES[name]}')"}, {"pack", "pack.a"}),
    ],
    ids=["three modules", "inside a function", "through a package", "import_module", "a table", "lazy names"],
)
def test_a_circle_is_found(sources, circle, tmp_path):
    assert cycles(_graph_of(sources, tmp_path)) == [circle]


@pytest.mark.parametrize(
    "sources",
    [
        {"a": "import pack.b, pack.c", "b": "import pack.c", "c": ""},
        {"a": "import pack.b", "b": "if TYPE_CHECKING:\n    import pack.a"},
        {"a": "KEY = 'pack.key'", "__init__": "import pack.a"},
    ],
    ids=["one way", "for type checkers only", "a name of something else"],
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
        "import memexplore.run.simulate, memexplore.jupyter.magics, memexplore.page.report, memexplore.cli;"
        "import memexplore as mx;"
        "print([name for name in mx.__all__ if type(getattr(mx, name)).__name__ == 'module'])"
    )
    assert (
        subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.strip() == "[]"
    )


# snapshot/ reads names of torch's functions in the stacks of recordings, which any release may have made.
_USES_TORCH = [path for path in modules() if unit(path) in TORCH - {"torch_internals"}]

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
    folders = ROOT / "run" / "code", ROOT / "run" / "knobs"
    codegen = [path for path in modules() if any(path.is_relative_to(folder) for folder in folders)]
    assert private_names.in_texts(codegen) & private_names.LEAVES <= set(GENERATED)


@pytest.mark.parametrize(
    "line",
    [
        "from torch.utils import _pytree",
        "import torch._subclasses",
        "from torch._C import _current_autograd_node",
        "version = tensor._version",
        "key = storage(tensor)._cdata",
        "flag = getattr(tensor, '_python_dispatch', False)",
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
        "import memexplore.text.units as _units",
    ],
)
def test_operators_and_names_of_our_own_are_not_private_names_of_torch(line, tmp_path):
    (tmp_path / "new.py").write_text(line)
    assert private_names.in_files([tmp_path / "new.py"]) == []
