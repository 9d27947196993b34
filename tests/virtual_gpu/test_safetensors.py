"""safetensors on a virtual GPU: files with values are loaded onto it, and files without values never replace them."""

from __future__ import annotations

import pathlib
import shutil
from collections.abc import Iterator

import numpy
import pytest
import safetensors
import safetensors.numpy
import torch
from safetensors.torch import load, load_file, load_model, save, save_file, save_model

import memexplore as mx
from memexplore.virtual_gpu.files import session

pytestmark = pytest.mark.filterwarnings("ignore:memexplore.*temporary folder")


@pytest.fixture
def path(tmp_path: pathlib.Path) -> Iterator[pathlib.Path]:
    """A real file with the values 0, 1, 2, which must not change."""
    path = tmp_path / "model.safetensors"
    save_file({"w": torch.arange(3.0)}, path)
    before = path.read_bytes()
    yield path
    assert path.read_bytes() == before


@pytest.mark.parametrize("device", ["cuda", "cuda:0", 0])
def test_a_real_file_is_loaded_onto_the_device(path, device):
    with mx.virtual("T4"):
        loaded = load_file(path, device=device)
        assert loaded["w"].is_cuda
        assert torch.cuda.memory_allocated() == 512  # 3 * 4 bytes rounded up to 512


def test_a_real_file_keeps_its_values_on_the_cpu(path):
    with mx.virtual("T4"):
        assert load_file(path)["w"].tolist() == [0.0, 1.0, 2.0]


def test_torch_load_reads_a_real_file_onto_the_device(path):
    with mx.virtual("T4"):
        if tuple(map(int, torch.__version__.split(".")[:2])) >= (2, 13):
            assert torch.load(path, map_location="cuda")["w"].is_cuda


def test_parts_of_a_real_file_are_loaded_onto_the_device(path):
    with mx.virtual("T4"), safetensors.safe_open(path, "pt", device="cuda") as file:
        part = file.get_slice("w")
        assert (part.get_shape(), part.get_dtype(), part[:2].shape) == ([3], "F32", (2,))
        assert part[:2].is_cuda
        assert list(file.keys()) == ["w"]


def test_a_saved_file_is_read_by_the_program_only(path):
    with mx.virtual("T4"):
        save_file({"w": torch.empty(2, 5, dtype=torch.bfloat16, device="cuda")}, path, metadata={"format": "pt"})
        loaded = load_file(path, device="cuda")["w"]
        assert (loaded.shape, loaded.dtype, loaded.is_cuda) == ((2, 5), torch.bfloat16, True)
        with safetensors.safe_open(path, "pt") as file:
            assert (file.metadata(), list(file.keys())) == ({"format": "pt"}, ["w"])
            assert (file.get_slice("w").get_dtype(), file.get_tensor("w").device.type) == ("BF16", "cpu")
            with pytest.raises(KeyError):
                file.get_tensor("missing")
    assert load_file(path)["w"].tolist() == [0.0, 1.0, 2.0]


def test_known_values_are_saved_and_replace_no_file(path):
    with mx.virtual("T4"):
        save_file({"w": torch.tensor([3, 4], device="cuda")}, path, metadata={"format": "pt"})
        assert load_file(path, device="cuda")["w"].tolist() == [3, 4]
        assert load(save({"w": torch.tensor([3, 4], device="cuda")}))["w"].tolist() == [3, 4]
    kept = session.report()[0].partition(" was written to ")[2].partition(". ")[0]
    assert load_file(kept + str(path))["w"].tolist() == [3, 4]
    shutil.rmtree(kept)


def test_arrays_replace_no_file_that_existed_before_a_run(path):
    with session.every_file(), mx.virtual("T4"):
        safetensors.numpy.save_file({"w": numpy.zeros(3)}, path)
        assert safetensors.numpy.load_file(path)["w"].tolist() == [0.0, 0.0, 0.0]


def test_loading_a_saved_file_allocates_one_tensor_at_a_time(path):
    with mx.virtual("T4"):
        save_file({"a": torch.empty(1000, device="cuda"), "b": torch.empty(1000, device="cuda")}, path)
        with safetensors.safe_open(path, "pt", device="cuda") as file:
            assert torch.cuda.memory_allocated() == 0
            kept = file.get_tensor("a")
            assert torch.cuda.memory_allocated() == 4096  # 1000 * 4 bytes rounded up to 8 * 512
        assert kept.is_cuda


def test_bytes_are_saved_and_loaded():
    with mx.virtual("T4"):
        assert load(save({"w": torch.ones(2, 5, device="cuda")}))["w"].shape == (2, 5)
        assert load(save({"w": torch.ones(2)}))["w"].tolist() == [1.0, 1.0]


def _tied() -> torch.nn.Module:
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4)).cuda()
    model[1].weight = model[0].weight
    return model


def test_tensors_that_share_memory_are_found(path):
    with mx.virtual("T4"):
        with pytest.raises(RuntimeError, match="share memory"):
            save_file(_tied().state_dict(), path)
        save_model(_tied(), path)
        assert sorted(load_file(path)) == ["0.bias", "0.weight", "1.bias"]
        assert load_model(_tied(), path) == (set(), [])


def test_tensors_without_memory_on_the_cpu_share_none(path):
    with mx.virtual("T4"):
        # Each weight has 600 * 600 * 4 bytes, over 1 MiB, so building the modules takes no memory.
        model = torch.nn.Sequential(torch.nn.Linear(600, 600), torch.nn.Linear(600, 600))
        save_model(model, path)
        assert len(load_file(path)) == 4


def test_a_tensor_that_is_not_contiguous_is_refused_as_on_a_real_gpu(path):
    with mx.virtual("T4"), pytest.raises(ValueError, match="not contiguous"):
        save_file({"w": torch.ones(2, 5, device="cuda").t()}, path)


def test_saving_afterwards_is_one_sentence_and_the_file_stays(path):
    with mx.virtual("T4"):
        tensor = torch.ones(3, device="cuda")
    with pytest.raises(RuntimeError, match="made on a virtual GPU, which is off now"):
        save_file({"w": tensor}, path)


def test_functions_are_restored():
    before = {name: value for name, value in vars(safetensors.torch).items() if callable(value)}
    with mx.virtual("T4"):
        assert safetensors.torch.safe_open is not before["safe_open"]
    assert {name: value for name, value in vars(safetensors.torch).items() if callable(value)} == before
    assert safetensors.safe_open is before["safe_open"]
