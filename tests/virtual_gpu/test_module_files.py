"""Files and pickles of modules and tensors on the virtual GPU."""

from __future__ import annotations

import io
import pickle
from collections.abc import Iterator
from typing import Any
from unittest import mock

import pytest
import torch

import memexplore as mx
from tests.virtual_gpu.networks import allocated, backward, network


@pytest.fixture(autouse=True)
def device() -> Iterator[None]:
    with mx.virtual("T4"):
        yield


def _file(value: Any) -> io.BytesIO:
    file = io.BytesIO()
    torch.save(value, file)
    file.seek(0)
    return file


def test_a_checkpoint_is_saved_and_loaded() -> None:
    model = network().cuda()
    optimizer = torch.optim.AdamW(model.parameters())
    backward(model)
    optimizer.step()
    file = _file({"model": model.state_dict(), "optimizer": optimizer.state_dict(), "epoch": 3})
    loaded = torch.load(file)
    assert loaded["epoch"] == 3
    assert loaded["model"]["0.weight"].is_cuda
    other = network().cuda()
    resumed = torch.optim.AdamW(other.parameters())
    other.load_state_dict(loaded["model"])
    resumed.load_state_dict(loaded["optimizer"])
    backward(other)
    resumed.step()
    assert resumed.state[other[0].weight]["exp_avg"].is_cuda


@pytest.mark.parametrize(
    "target", ["cuda", "cuda:0", torch.device("cuda"), {"cpu": "cuda:0"}, lambda kept, saved: kept.cuda()]
)
def test_a_file_of_real_tensors_is_loaded_onto_the_device(target: Any) -> None:
    loaded = torch.load(_file({"w": torch.ones(1000), "n": [torch.ones(2)]}), map_location=target)
    assert loaded["w"].is_cuda
    assert loaded["n"][0].is_cuda
    assert allocated() == 4_096 + 512  # 1000 * 4 rounded up to 512 * 8


@pytest.mark.parametrize("target", [None, "cpu", torch.device("cpu"), lambda kept, saved: kept])
def test_a_file_of_real_tensors_keeps_its_values_on_the_cpu(target: Any) -> None:
    loaded = torch.load(_file({"w": torch.arange(3.0)}), map_location=target)
    assert loaded["w"].tolist() == [0.0, 1.0, 2.0]


def test_a_file_saved_on_a_real_gpu_is_loaded_onto_the_virtual_gpu() -> None:
    with mock.patch("torch.serialization.location_tag", lambda storage: "cuda:0"):
        file = _file({"w": torch.ones(3)})
    assert torch.load(file)["w"].is_cuda
    file.seek(0)
    assert torch.load(file, map_location="cpu")["w"].tolist() == [1.0, 1.0, 1.0]


def test_tensors_that_share_memory_in_a_file_share_it_on_the_device() -> None:
    whole = torch.ones(1000)
    loaded = torch.load(_file({"a": whole, "b": whole[:10]}), map_location="cuda")
    assert loaded["a"].data_ptr() == loaded["b"].data_ptr()
    assert allocated() == 4_096


def test_a_whole_model_is_saved_and_pickled() -> None:
    model = network().cuda()
    assert torch.load(_file(model), weights_only=False)[0].weight.is_cuda
    assert pickle.loads(pickle.dumps(model))[0].weight.is_cuda


def test_state_dicts_are_loaded_across_devices() -> None:
    moved, real = network().cuda(), network()
    moved.load_state_dict(real.state_dict())
    assert moved[0].weight.is_cuda
    kept = real[0].weight.clone()
    real.load_state_dict({name: value.cpu() for name, value in moved.state_dict().items()}, assign=True)
    assert not real[0].weight.is_cuda
    assert kept.shape == real[0].weight.shape
