"""Compiled extensions that read the memory of a virtual tensor: one sentence with the names of both."""

from __future__ import annotations

import copy
import importlib.util
import subprocess
import sys
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


READS = {
    "typed": "x.data_ptr<float>()[0]",
    "untyped": "((float*)x.data_ptr())[0]",
    "constant": "x.const_data_ptr<float>()[0]",
    "untyped_constant": "((const float*)x.const_data_ptr())[0]",
    "written": "x.mutable_data_ptr<float>()[0]",
    "accessor": "x.accessor<float, 1>()[0]",
    "packed": "x.packed_accessor32<float, 1>()[0]",
    "of_storage": "((const float*)x.storage().data())[0]",
    "pointer_of_storage": "((const float*)x.storage().data_ptr().get())[0]",
    "implementation": "((const float*)x.unsafeGetTensorImpl()->data())[0]",
}
EXTENSION = (
    "\n".join(f"float {name}(torch::Tensor x) {{ return {code}; }}" for name, code in READS.items())
    + """
struct Layer {
    float forward(torch::Tensor x) { return untyped_constant(x); }
    static float scale(torch::Tensor x) { return untyped_constant(x); }
    float operator()(torch::Tensor x) const { return untyped_constant(x); }
};
torch::Tensor computes(torch::Tensor x) { return (x * 2).view({-1}).narrow(0, 0, 512).add_(1).clone(); }
TORCH_LIBRARY(reading_cpp, library) {
    library.def("read(Tensor x) -> float", [](torch::Tensor x) -> double { return untyped_constant(x); });
}
PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
    pybind11::class_<Layer>(m, "Layer").def(pybind11::init<>()).def("forward", &Layer::forward)
        .def_static("scale", &Layer::scale).def("__call__", &Layer::operator());
    m.def("computes", &computes);
"""
    + "\n".join(f'm.def("{name}", &{name});' for name in READS)
    + "}"
)


@pytest.fixture(scope="module")
def reading(tmp_path_factory: pytest.TempPathFactory) -> ModuleType:
    """An extension of torch that reads the memory of its arguments in every way."""
    folder = str(tmp_path_factory.mktemp("reading"))
    return load_inline("reading_cpp", cpp_sources=EXTENSION, build_directory=folder, extra_cflags=["-O0"])  # type: ignore[no-any-return]


@pytest.mark.slow
@pytest.mark.parametrize("name", READS)
@pytest.mark.parametrize(
    "make",
    [lambda: torch.ones(3, device="cuda"), lambda: torch.ones(4, device="cuda")[1:], _made_by_a_module],
    ids=["tensor", "view", "parameter"],
)
def test_an_extension_of_torch_reads_no_memory(
    reading: ModuleType, name: str, make: Callable[[], torch.Tensor]
) -> None:
    function = getattr(reading, name)
    assert _error(lambda: function(make())) == SENTENCE.format(name, "reading_cpp", MEMORY)


@pytest.mark.slow
def test_methods_and_operators_of_an_extension_read_no_memory(reading: ModuleType) -> None:
    layer = reading.Layer()
    assert _error(lambda: layer.forward(torch.ones(3, device="cuda"))).startswith(
        f"forward of the compiled extension reading_cpp {MEMORY}, which"
    )
    assert _error(lambda: reading.Layer.scale(torch.ones(3, device="cuda"))).startswith(
        f"scale of the compiled extension reading_cpp {MEMORY}, which"
    )
    read = torch.ops.reading_cpp.read
    assert _error(lambda: read(torch.ones(3, device="cuda"))).startswith(f"the operator reading_cpp.read {MEMORY}")
    # Where the line does not name the function.
    assert _error(lambda: layer(torch.ones(3, device="cuda"))).startswith(f"compiled code {MEMORY}, which")
    assert _error(lambda: [*map(layer.forward, [torch.ones(3, device="cuda")])]).startswith(f"compiled code {MEMORY}")


@pytest.mark.slow
def test_tensors_made_before_the_import_of_an_extension_are_not_read(reading: ModuleType) -> None:
    code = (
        "import sys, torch, memexplore as mx\n"
        "with mx.virtual('T4'):\n"
        "    x = torch.ones(3, device='cuda')\n"
        f"    sys.path.insert(0, {str(Path(str(reading.__file__)).parent)!r})\n"
        "    import reading_cpp\n"
        "    try:\n"
        "        reading_cpp.of_storage(x[1:])\n"
        "    except RuntimeError as error:\n"
        "        print(error)\n"
        "print(reading_cpp.of_storage(torch.full((3,), 5.0)))\n"
        "with mx.virtual('T4'):\n"
        "    try:\n"
        "        reading_cpp.of_storage(torch.ones(3, device='cuda'))\n"
        "    except RuntimeError as error:\n"
        "        print(error)\n"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert [line.partition(" data ")[0] for line in result.stdout.splitlines()] == [
        "Cannot access",
        "5.0",
        "Cannot access",
    ]


@pytest.mark.slow
def test_an_extension_that_computes_with_ops_has_their_memory(reading: ModuleType) -> None:
    def tape(function: Callable[[torch.Tensor], torch.Tensor]) -> Any:
        with mx.virtual("T4"):
            x = torch.ones(1024, device="cuda")
            with mx.record() as recording:
                assert function(x).tolist() == [3.0] * 512
        return recording.tape

    python = tape(lambda x: (x * 2).view(-1)[:512].add_(1).clone())
    cpp = tape(reading.computes)
    assert (cpp.size.tolist(), cpp.action.tolist()) == (python.size.tolist(), python.action.tolist())
    assert mx.peak(cpp)[0] == 3 * 4096 - 2048  # x, twice x, and half of it: 4 + 4 + 2 KiB


@pytest.mark.slow
def test_beside_an_extension_everything_else_works(reading: ModuleType) -> None:
    assert reading is not None
    with mx.virtual("T4"):
        x = torch.arange(8.0, device="cuda")
        x[:4].add_(x[4:])
        storage = x.untyped_storage()
        assert torch.empty(0, device="cuda").set_(storage, 1, (2,), (1,)).tolist() == [6.0, 8.0]
        assert copy.deepcopy(x).tolist() == [4.0, 6.0, 8.0, 10.0, 4.0, 5.0, 6.0, 7.0]
        storage.fill_(0)
        storage.resize_(0)
        assert storage.nbytes() == 0
        layer = torch.nn.Linear(8, 8).cuda()
        with torch.profiler.profile(record_shapes=True, with_stack=True) as profile:
            layer(torch.ones(2, 8, device="cuda")).sum().backward()
        assert any(event.key == "aten::addmm" for event in profile.key_averages())
        read = reading.of_storage
        with pytest.raises(RuntimeError):
            read(torch.ones(3, device="cuda"))


@pytest.mark.slow
def test_beside_an_extension_gradients_are_reduced(reading: ModuleType) -> None:
    assert reading is not None
    with mx.virtual("T4"):
        torch.distributed.init_process_group("nccl", rank=0, world_size=2)
        model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(8, 8).cuda(), device_ids=[0])
        model(torch.ones(2, 8, device="cuda")).sum().backward()
        assert model.module.bias.grad is not None
    with mx.virtual("T4"), pytest.raises(RuntimeError):
        reading.of_storage(torch.ones(3, device="cuda"))
