"""Compiled extensions that read the memory of a virtual tensor: one sentence with the names of both."""

from __future__ import annotations

import importlib.util
import subprocess
import sysconfig
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch.utils.cpp_extension import load_inline

import memexplore as mx
from tests.needs import HAS_COMPILER

pytestmark = pytest.mark.skipif(not HAS_COMPILER, reason="no compiler")

SENTENCE = (
    "{} of the compiled extension {} {}, which a virtual GPU does not have: use the package's version in plain PyTorch "
    "if there is one, or profile on a real GPU"
)
MEMORY = "reads the memory of a tensor"
PLACE = "asks for a tensor in the memory of a GPU"
SOURCE = """
#include <Python.h>
static PyObject *fail(PyObject *self, PyObject *text) {
    PyErr_SetObject(PyExc_RuntimeError, text);
    return NULL;
}
static PyMethodDef methods[] = {{"render", fail, METH_O, ""}, {NULL}};
static struct PyModuleDef module = {PyModuleDef_HEAD_INIT, "rasterizer", NULL, -1, methods};
PyMODINIT_FUNC PyInit_rasterizer(void) { return PyModule_Create(&module); }
"""


@pytest.fixture(scope="module")
def rasterizer(tmp_path_factory: pytest.TempPathFactory) -> ModuleType:
    """An extension whose function raises a RuntimeError with the text that it is given."""
    folder = tmp_path_factory.mktemp("extension")
    source, library = folder / "rasterizer.c", folder / "rasterizer.so"
    source.write_text(SOURCE)
    include = sysconfig.get_paths()["include"]
    subprocess.run(["g++", "-x", "c", "-shared", "-fPIC", f"-I{include}", source, "-o", library], check=True)
    spec = importlib.util.spec_from_file_location("rasterizer", library)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _error(run: Any) -> str:
    with mx.virtual("T4"), pytest.raises(RuntimeError) as caught, mx.record():
        run()
    return str(caught.value)


@pytest.mark.parametrize(
    ("text", "does"),
    [
        ("The tensor has a non-zero number of elements, but its data is not allocated yet.\nIf you're using", MEMORY),
        ("Cannot access data pointer of Tensor (e.g. FakeTensor, FunctionalTensor).", MEMORY),
        ("means3D must be a CUDA tensor", PLACE),
        ("x must be on CUDA", PLACE),
    ],
)
def test_the_error_names_the_extension_and_its_function(rasterizer: ModuleType, text: str, does: str) -> None:
    def run() -> None:
        rasterizer.render(
            text,
        )

    assert _error(run) == SENTENCE.format("render", "rasterizer", does)


def test_the_extension_may_be_called_by_a_function_of_autograd(rasterizer: ModuleType) -> None:
    class Rasterize(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, points: torch.Tensor) -> Any:
            render = rasterizer.render
            return render("points must be a CUDA tensor"), len([points])

    class Holder:
        _C = rasterizer

    assert _error(lambda: Rasterize.apply(torch.ones(3, device="cuda"))) == SENTENCE.format(
        "render", "rasterizer", PLACE
    )
    holder = Holder()
    assert "render of the compiled" in _error(lambda: str(holder._C.render("x must be a CUDA tensor")))


def test_other_errors_are_left_as_they_are(rasterizer: ModuleType) -> None:
    assert _error(lambda: rasterizer.render("points must have 3 columns")) == "points must have 3 columns"

    def fail() -> None:
        raise RuntimeError("x must be a CUDA tensor")

    assert _error(fail) == "x must be a CUDA tensor"
    with pytest.raises(RuntimeError, match=r"^x must be a CUDA tensor$"), mx.record(device="cpu"):
        rasterizer.render("x must be a CUDA tensor")


def _made_by_a_module() -> torch.Tensor:
    return torch.nn.Linear(1024, 1024).weight.data[0]  # on the CPU, without values


@pytest.mark.slow
def test_an_extension_of_torch_reads_no_memory(tmp_path: Path) -> None:
    reads = {
        "typed": "x.data_ptr<float>()[0]",
        "untyped": "((float*)x.data_ptr())[0]",
        "constant": "x.const_data_ptr<float>()[0]",
        "written": "x.mutable_data_ptr<float>()[0]",
        "accessor": "x.accessor<float, 1>()[0]",
        "packed": "x.packed_accessor32<float, 1>()[0]",
    }
    source = "\n".join(f"float {name}(torch::Tensor x) {{ return {code}; }}" for name, code in reads.items())
    module = load_inline(
        "reading_cpp", cpp_sources=source, functions=list(reads), build_directory=str(tmp_path), extra_cflags=["-O0"]
    )
    for name, function in ((name, getattr(module, name)) for name in reads):
        for make in (lambda: torch.ones(3, device="cuda"), lambda: torch.ones(4, device="cuda")[1:], _made_by_a_module):

            def run(function: Any = function, make: Callable[[], torch.Tensor] = make) -> None:
                function(make())

            assert _error(run) == SENTENCE.format(name, "reading_cpp", MEMORY)
